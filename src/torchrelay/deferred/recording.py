"""Writing operations into the record, and evaluating what the recorded program itself wants to see."""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import session as sessions
from torchrelay.deferred.draws import words_drawn
from torchrelay.deferred.graph import External, History, Node, Region, map_tensors
from torchrelay.deferred.operators import Operator
from torchrelay.deferred.replay import Replay
from torchrelay.deferred.session import Session
from torchrelay.deferred.tensor import FakeTensor
from torchrelay.errors import DeferredError

__all__ = ["end_states", "record"]


def record(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    writes: tuple[Region, ...] = (),
    outputs: tuple[Region | None, ...] = (),
) -> None:
    """Appends ``func`` to the histories of the storages it writes.

    Raises:
        DeferredError: an argument is a fake tensor that has no history: one made by ``fake_mode``.
    """
    reads: list[Region] = []
    keeps: list[History] = []

    def remember(value: torch.Tensor) -> Region | External:
        if not isinstance(value, FakeTensor):
            return External(value)
        region = value._region
        if not region.storage.deferred:
            raise DeferredError(
                f"{func}: a fake tensor that was made outside deferred_init has no history to materialize it from, "
                f"so it cannot be used with deferred tensors: {value!r}"
            )
        if not any(region is written for written in writes):
            reads.append(region)
            keeps.append(value._history)
        return region

    node_args = map_tensors(args, torch.Tensor, remember)
    node_kwargs = map_tensors(kwargs, torch.Tensor, remember) if kwargs else {}
    generator = node_kwargs.pop("generator", None)
    node = Node(func, node_args, node_kwargs, tuple(reads), writes, outputs, tuple(keeps))
    results = [region for region in outputs if region is not None]
    if operator.draws:
        _place(node, generator, writes[0] if writes else results[0])
    node.link()
    if operator.is_factory and results:
        _fix_attributes(node, operator, results[0])


def _fix_attributes(node: Node, operator: Operator, result: Region) -> None:
    """What a factory took from the defaults of its time becomes explicit."""
    if operator.takes_dtype:
        node.kwargs["dtype"] = result.dtype
    if operator.takes_device:
        node.kwargs["device"] = result.storage.device


def _place(node: Node, generator: torch.Generator | None, target: Region) -> None:
    device = target.storage.device
    counted = device.type == "cpu" or not _torch.device_available(device)
    words = words_drawn(node.func, target, node.args) if counted else None
    session = sessions.current()
    if session is not None:
        session.draw(node, generator, device, words)
        return
    alone = Session(deferred=True)
    try:
        alone.draw(node, generator, device, words)
    finally:
        alone.close(end_states())


def end_states() -> Any:
    """A function from a position to the generator's state there."""
    return Replay().generators.state
