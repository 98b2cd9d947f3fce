"""Autograd: the running backward pass, and ``torch.func`` transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad

__all__ = [
    "after_backward",
    "apply_of",
    "backward_id",
    "backward_keeps_graph",
    "backward_will_run",
    "first_hook",
    "forward_mode_active",
    "has_saving_hooks",
    "is_transformed",
    "strip_dead_transform",
    "transforms_active",
]


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """Return ``function.apply`` without its checks for ``torch.func`` transforms, 5 us faster.

    Only for use outside of transforms.
    """
    plain: Any = super(torch.autograd.Function, function)
    return plain.apply


# Asked at every communication, so they are torch's own functions, without a call in between.
# The number of the backward pass that runs in this thread, or -1.
backward_id: Callable[[], int] = torch._C._current_graph_task_id
# Whether the running backward pass was given ``retain_graph``.
backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Whether a ``torch.func`` transform is active in this thread.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def has_saving_hooks() -> bool:
    """Whether saved tensors pass through hooks, as in a checkpointed segment."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def backward_will_run(node: torch.autograd.graph.Node) -> bool:
    """Whether the running backward pass executes ``node``."""
    return torch._C._will_engine_execute_node(node)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has succeeded."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def first_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register ``hook`` as ``Tensor.register_hook`` does, but before the hooks that ``tensor`` has.

    torch calls them in the order of their dictionary.
    """
    handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks: Any = tensor._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def forward_mode_active() -> bool:
    """Whether a forward-mode dual level is open."""
    return torch.autograd.forward_ad._current_level >= 0


def strip_dead_transform(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the wrappers of ``torch.func`` transforms that have ended."""
    functorch: Any = torch._C._functorch
    while functorch.is_dead_tensor_wrapper(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.func`` transform wraps ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
