"""Adaptive parameter manager: tables of vectors whose rows move to the nodes that use them.

Workers announce the keys they will access (*intent*). The manager relocates a key to the only node
that needs it, or replicates it if several do, just in time. It implements "Good Intentions:
Adaptive Parameter Management via Intent Signaling" (Renz-Wieland et al., CIKM 2023), NuPS (SIGMOD
2022) and Lapse (VLDB 2020).

For PyTorch: :class:`Table`, :class:`Embedding`, :class:`EmbeddingBag`, :class:`TableOptimizer`,
:class:`TableWeight`, :mod:`.optim`, :class:`IntentLoader`, :class:`Metrics`, :class:`KeyInit`.
Below them: :class:`Server` and :class:`Worker` (with :class:`AccessHandle` and
:class:`UpdateRule`), which :meth:`Table.create` makes under a launcher (``table.server``,
``table.worker``), or made by hand over a :class:`Topology`.
"""

from torchrelay.parameters import optim
from torchrelay.parameters._contract import KeyInit, Metrics, UpdateRule
from torchrelay.parameters._embedding import Embedding, EmbeddingBag
from torchrelay.parameters._intents import IntentLoader
from torchrelay.parameters._server import Server
from torchrelay.parameters._table import Table
from torchrelay.parameters._topology import Topology
from torchrelay.parameters._weight import TableOptimizer, TableWeight
from torchrelay.parameters._worker import AccessHandle, Worker

__all__ = [
    "AccessHandle",
    "Embedding",
    "EmbeddingBag",
    "IntentLoader",
    "KeyInit",
    "Metrics",
    "Server",
    "Table",
    "TableOptimizer",
    "TableWeight",
    "Topology",
    "UpdateRule",
    "Worker",
    "optim",
]
