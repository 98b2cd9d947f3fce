"""Backward passes that reach every communication, whether or not the loss depends on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrelay.errors import GraphError
from torchrelay.mpi import _chain

__all__ = ["backward", "grad"]


def backward(
    loss: Tensor | None = None,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """Call ``loss.backward(gradient)`` through all communications since the last backward pass.

    Collective over all ranks that communicated. A rank without a loss passes none.

    Args:
        loss: any shape; a scalar needs no ``gradient``.
        gradient: of the shape of ``loss``; a scalar loss needs none.
        retain_graph: as for ``Tensor.backward``.
        create_graph: as for ``Tensor.backward``.
    """
    outputs, grads = _roots([] if loss is None else [loss], [] if loss is None else [gradient])
    if outputs:
        torch.autograd.backward(outputs, grads, retain_graph, create_graph)


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """Call ``torch.autograd.grad`` through all communications since the last backward pass.

    Collective over all ranks that communicated. Arguments and results are those of
    ``torch.autograd.grad``.

    Raises:
        GraphError: the outputs do not depend on an input, and ``allow_unused`` is false.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if grad_outputs is None:
        grad_outputs = [None] * len(outputs)
    elif isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs]
    roots, cotangents = _roots(outputs, list(grad_outputs))
    results = torch.autograd.grad(
        roots,
        [*inputs, _chain.ROOT],
        cotangents,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,
    )[:-1]
    if materialize_grads:
        return tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(inputs, results, strict=True)
        )
    if not allow_unused and any(g is None for g in results):
        unused = [number for number, g in enumerate(results) if g is None]
        raise GraphError(
            f"the outputs do not depend on inputs {unused}; allow_unused=True gives None for them"
        )
    return results


def _roots(
    outputs: list[Tensor], grads: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs that have a graph, and the head of the chain."""
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    chain = _chain.active()
    if chain is not None and chain.head is not None:
        pairs.append((chain.head, torch.zeros_like(chain.head)))
    return [y for y, _ in pairs], [g for _, g in pairs]
