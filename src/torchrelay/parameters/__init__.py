"""Adaptive parameter manager: tables of vectors whose rows move to the nodes that use them.

Workers announce the keys they will access (*intent*). The manager relocates a key to the only node
that needs it, or replicates it if several do, just in time. It implements "Good Intentions:
Adaptive Parameter Management via Intent Signaling" (Renz-Wieland et al., CIKM 2023), NuPS (SIGMOD
2022) and Lapse (VLDB 2020).

For PyTorch: :class:`Table`, :class:`Embedding`, :class:`EmbeddingBag`, :class:`TableOptimizer`,
:class:`TableWeight`, :mod:`.optim`, :class:`IntentLoader`, :class:`Metrics`, :class:`KeyInit`.
Below
them: :class:`Server` and :class:`Worker`, created by :func:`start` under a launcher or over a
:class:`Topology`, and :class:`UpdateRule`.
"""

from torchrelay._deprecation import old_modules
from torchrelay.parameters import optim
from torchrelay.parameters._contract import KeyInit, UpdateRule
from torchrelay.parameters._embedding import Embedding, EmbeddingBag
from torchrelay.parameters._intents import IntentLoader
from torchrelay.parameters._metrics import Metrics
from torchrelay.parameters._optimizer import TableOptimizer
from torchrelay.parameters._server import Server
from torchrelay.parameters._starting import Place, start
from torchrelay.parameters._table import Table
from torchrelay.parameters._topology import Topology
from torchrelay.parameters._weight import TableWeight
from torchrelay.parameters._worker import Worker

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "IntentLoader",
    "KeyInit",
    "Metrics",
    "Place",
    "Server",
    "Table",
    "TableOptimizer",
    "TableWeight",
    "Topology",
    "UpdateRule",
    "Worker",
    "optim",
    "start",
]

old_modules(
    __name__,
    "contract",
    "embedding",
    "intents",
    "metrics",
    "sampling",
    "server",
    "starting",
    "table",
    "topology",
    "worker",
)
