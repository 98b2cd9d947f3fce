"""Adaptive parameter manager: tables of vectors whose rows move to the nodes that use them.

Workers announce the keys they will access (*intent*). The manager relocates a key to the only node
that needs it, or replicates it if several do, just in time. It implements "Good Intentions:
Adaptive Parameter Management via Intent Signaling" (Renz-Wieland et al., CIKM 2023), NuPS (SIGMOD
2022) and Lapse (VLDB 2020).

A :class:`Table` is the rows; :class:`Embedding` and :class:`EmbeddingBag` are modules over one.
:class:`TableOptimizer` steps their :class:`TableWeight`; :class:`IntentLoader` announces the keys
of coming batches. :mod:`torchrelay.compat.adapm` has AdaPM's own interface.
"""

from torchrelay.parameters import optim
from torchrelay.parameters._contract import KeyInit, Metrics, UpdateRule
from torchrelay.parameters._embedding import Embedding, EmbeddingBag
from torchrelay.parameters._intents import IntentLoader
from torchrelay.parameters._table import Table
from torchrelay.parameters._weight import TableOptimizer, TableWeight

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "IntentLoader",
    "KeyInit",
    "Metrics",
    "Table",
    "TableOptimizer",
    "TableWeight",
    "UpdateRule",
    "optim",
]


def __dir__() -> list[str]:
    return __all__
