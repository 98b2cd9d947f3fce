"""Recording of operations."""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _session as sessions
from torchrelay.deferred._draws import words_drawn
from torchrelay.deferred._graph import External, History, Node, Region, map_tensors
from torchrelay.deferred._operators import Operator
from torchrelay.deferred._session import FakeSession
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.errors import DeferredError

__all__ = ["record"]


def record(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    writes: tuple[Region, ...] = (),
    outputs: tuple[Region | None, ...] = (),
) -> Node:
    """Append ``func`` to the histories of the storages it writes.

    Returns:
        The entry.

    Raises:
        DeferredError: an argument is a fake tensor without history, from ``fake_mode``.
    """
    results = [region for region in outputs if region is not None]
    several = len(writes) + len(results) > 1
    reads: list[Region] = []
    keeps: list[History] = []

    reads_outside = False

    def noted(external: External) -> External:
        nonlocal reads_outside
        reads_outside = True
        session = sessions.recording()
        if session is not None:
            session.note_read(external)
        return external

    def remember(value: torch.Tensor) -> Region | External:
        if not isinstance(value, FakeTensor):
            return noted(External(value))
        region = value._region
        if not region.storage.deferred:
            raise DeferredError(
                f"{func}: a fake tensor that was made outside deferred_init has no history to "
                f"materialize it from, so it cannot be used with deferred tensors: {value!r}"
            )
        escaped = value._history.escaped
        if escaped is not None:
            return noted(External(region.of(escaped), escaped))
        if not any(region is written for written in writes):
            reads.append(region)
            keeps.append(value._history)
        elif several:  # who wants one of its results must be able to make the others
            keeps.append(value._history)
        return region

    node_args = map_tensors(args, torch.Tensor, remember)
    node_kwargs = map_tensors(kwargs, torch.Tensor, remember) if kwargs else {}
    generator = node_kwargs.pop("generator", None)
    node = Node(func, node_args, node_kwargs, tuple(reads), writes, outputs, tuple(keeps))
    node.overwrites = operator.fills and _is_overwritten(writes[0], node)
    if operator.is_factory and results:
        _fix_attributes(node, operator, results[0])
    if operator.draws:
        _place(node, generator, [*writes, *results])
    node.link(reads_outside)
    return node


def _is_overwritten(target: Region, node: Node) -> bool:
    """Return whether a fill of ``target`` covers its storage, of which ``node`` reads nothing."""
    return (
        target.is_whole
        and not any(region.storage is target.storage for region in node.reads)
        and sum(argument is target for argument in node.args) == 1
    )


def _fix_attributes(node: Node, operator: Operator, result: Region) -> None:
    """Make explicit what a factory took from the current defaults."""
    if operator.takes_dtype:
        node.kwargs["dtype"] = result.dtype
    if operator.takes_device:
        node.kwargs["device"] = result.storage.device


def _place(node: Node, generator: torch.Generator | None, targets: list[Region]) -> None:
    device = targets[0].storage.device if targets else torch.device("cpu")
    counted = device.type == "cpu" or not _torch.device_available(device)
    words = words_drawn(node.func, targets[0], node.args) if counted and targets else None
    session = sessions.current()
    if session is not None:
        session.draw(node, generator, device, words)
        return
    alone = FakeSession(deferred=True)
    try:
        alone.draw(node, generator, device, words)
    finally:
        alone.close(done=True)
