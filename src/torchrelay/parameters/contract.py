"""What the node offers to everything above it: the vocabulary of this room.

A *node* is a group of processes of one host that share one slab of values. Keys are int64; each key has a row
of ``length`` elements of the table's dtype. Under an :class:`UpdateRule` other than ``add`` a row also has
optimizer state beside its value, which travels with it, and :meth:`Worker.push` takes gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["KeyInit", "Parameters", "UpdateRule", "WorkerLike"]

RULES = ("add", "sgd", "adagrad", "rowwise_adagrad", "adam")
INITS = ("zeros", "constant", "uniform", "normal")


@dataclass(frozen=True)
class UpdateRule:
    """How the owner of a key applies what is pushed to it.

    Args:
        kind: ``add`` (value += pushed), or an optimizer as torch.optim defines it, applied to the pushed
            gradient: ``sgd``, ``adagrad``, ``rowwise_adagrad`` (one accumulator a row: the mean of the
            squared gradient), ``adam`` (steps counted per row).
        lr: learning rate; may be changed later by ``server.set_learning_rate``.
        weight_decay: added to the gradient as ``weight_decay * value``.
        initial_accumulator: Adagrad's accumulators start here.
    """

    kind: str = "add"
    lr: float = 1.0
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0


@dataclass(frozen=True)
class KeyInit:
    """The value of a key that nobody has set: a function of ``seed`` and the key alone, so equal everywhere.

    ``constant``: ``a``; ``uniform``: from [a, b); ``normal``: mean ``a``, standard deviation ``b``.
    """

    kind: str = "zeros"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0


class Parameters(Protocol):
    """One node's part of the table (``parameters.Server``)."""

    dtype: torch.dtype
    num_nodes: int
    node: int
    techniques: str

    @property
    def num_keys(self) -> int: ...
    def my_rank(self) -> int: ...

    # Elements of a whole row: the value, then the optimizer's state.
    def row_length(self, key: int = 0) -> int: ...
    def barrier(self) -> None: ...
    def shutdown(self) -> None: ...

    # Address for other processes of this host: Server.attach(address) maps the same slab.
    @property
    def address(self) -> str: ...
    def set_learning_rate(self, lr: float) -> None: ...

    # Counters since the start, summed over the node's processes: local_pulls, remote_pulls, local_pushes,
    # remote_pushes (keys), sent_bytes, received_bytes, sent_messages, relocations (in), replicas (now),
    # owned (now), rounds, refreshes, evictions, protocol_errors, round_seconds ...
    def statistics(self) -> dict[str, float]: ...


class WorkerLike(Protocol):
    """One worker's access (``parameters.Worker``); used by one thread at a time.

    ``keys``: int64, 1-d, contiguous, CPU, torch or numpy. ``values``: the table's dtype, contiguous, CPU, of
    any shape with each key's value after the other's. All raise ArgumentError before anything is written, PeerLostError once
    a node is lost, OperationTimeoutError after ``timeout_s``.
    """

    def pull(self, keys: Any, values: Any, asynchronous: bool = False) -> int: ...

    # A gradient under an optimizer rule; duplicates in one call are summed first, then applied once.
    def push(self, keys: Any, values: Any, asynchronous: bool = False) -> int: ...

    # Overwrites values; optimizer state is kept.
    def set(self, keys: Any, values: Any, asynchronous: bool = False) -> int: ...

    # Whole rows: value, then optimizer state, `row_length(key)` elements each (for checkpoints).
    def pull_rows(self, keys: Any, rows: Any) -> None: ...
    def set_rows(self, keys: Any, rows: Any) -> None: ...
    def pull_if_local(self, keys: Any, values: Any) -> bool: ...
    def wait(self, timestamp: int) -> None: ...
    def waitall(self) -> None: ...
    def is_finished(self, timestamp: int) -> bool: ...
    def intent(self, keys: Any, start: int, end: int = 0) -> int: ...
    def advance_clock(self) -> int: ...
    def current_clock(self) -> int: ...

    # The keys this node owns now, int64 (for sharded checkpoints: after wait_sync + barrier and without
    # concurrent intents every key is owned by exactly one node).
    def owned_keys(self) -> torch.Tensor: ...
    def wait_sync(self) -> None: ...
    def barrier(self) -> None: ...
    def finalize(self) -> None: ...
    def get_key_size(self, key: int = 0) -> int: ...
