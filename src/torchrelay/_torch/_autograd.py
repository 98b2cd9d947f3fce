"""Autograd: the running backward pass, and ``torch.func`` transforms."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad
from torch._functorch.pyfunctorch import (
    GradInterpreter,
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)

__all__ = [
    "after_backward",
    "apply_of",
    "backward_id",
    "backward_keeps_graph",
    "backward_will_run",
    "batched_by_all",
    "below_current",
    "computed_once",
    "first_hook",
    "forward_mode_active",
    "forward_mode_below",
    "grad_modes",
    "in_forward_transform",
    "is_transformed",
    "lowered",
    "outside_transforms",
    "recomputations",
    "recompute_whole",
    "saved_by_hooks",
    "transform_depth",
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


_T = TypeVar("_T")
_RECOMPUTES, _SAVES = "_recomputation_hook.", "_checkpoint_hook."


def saved_by_hooks() -> bool:
    """Whether hooks take the tensors saved now, such as those of a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def recomputations() -> list[Any]:
    """Return what identifies the checkpoints that are being recomputed, the innermost first.

    They are the hooks that take the recomputed tensors. Such a hook may lie below hooks of
    checkpoints inside of its own, and lives as long as the graph of what is recomputed.
    """
    return [hook for hook in _saving() if _is(hook, _RECOMPUTES)]


def recompute_whole() -> None:
    """Let the checkpoints whose segments run be recomputed to their end.

    Else that ends at the last tensor saved. It depends on the local operations, and leaves out what
    a checkpoint inside of it saves.
    """
    for hook in _saving():
        if _is(hook, _SAVES):
            _captured(hook, "frame").early_stop = False


def computed_once(compute: Callable[[], _T]) -> _T:
    """Return ``compute()``; in a checkpoint that is recomputed, what it returned there before."""
    logs, found = [], list[_T]()
    for hook in _saving():
        if _is(hook, _SAVES):
            logs.append(_computed.setdefault(_captured(hook, "frame"), []))
        elif _is(hook, _RECOMPUTES):
            before = _computed.get(_captured(hook, "target_frame_ref")(), [])
            position = _positions[hook] = _positions.get(hook, -1) + 1
            found = before[position : position + 1]
            break
    # A segment that differentiates its beginning is recomputed to its end before it has ended.
    result: _T = found[0] if found else compute()
    for log in logs:
        log.append(result)
    return result


# What was computed in the segment of a checkpoint, by its frame, which lives as long as its graph.
_computed: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
# How much of it has been asked for again, by the hook that takes what is recomputed.
_positions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _saving() -> list[Any]:
    """Return the hooks that take the tensors saved now, the innermost first."""
    saving: Any = torch._C._autograd
    stack = []
    while (hooks := saving._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(hooks)
        saving._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(stack):
        saving._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in stack]


def _is(hook: Any, kind: str) -> bool:
    return getattr(hook, "__qualname__", "").startswith(kind)


def _captured(hook: Any, name: str) -> Any:
    """Return a variable of the function in which ``hook`` was made."""
    function: Any = inspect.unwrap(hook)
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


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


def in_forward_transform() -> bool:
    """Whether the ``torch.func`` transform that runs now is one of forward mode."""
    functorch: Any = torch._C._functorch
    interpreter = functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == functorch.TransformType.Jvp


def forward_mode_below() -> Any:
    """Differentiate within a block of a ``jvp``, which disables it, in transforms below its own."""
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def outside_transforms() -> Any:
    """Make the tensors of a block as if no ``torch.func`` transform were active."""
    return temporarily_clear_interpreter_stack()


def grad_modes() -> list[bool]:
    """Return whether grad mode is on outside of all active ``torch.func`` transforms, and in each.

    Of those below the one that runs, torch itself turns it on while it differentiates.
    """
    modes = [torch.is_grad_enabled()]
    for each in reversed(retrieve_all_functorch_interpreters()):
        modes.append(each.prev_grad_mode() if isinstance(each, GradInterpreter) else modes[-1])
    return modes[::-1]


def transform_depth() -> int:
    """Return how many ``torch.func`` transforms are active."""
    return torch._C._functorch.maybe_current_level() or 0


def batched_by_all(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, with the batch dimension of every ``vmap`` that is active."""
    functorch: Any = torch._C._functorch
    tensor = inner = lowered(tensor)
    batched = set()
    while functorch.is_functorch_wrapped_tensor(inner):
        if functorch.is_batchedtensor(inner):
            batched.add(functorch.maybe_get_level(inner))
        inner = functorch.get_unwrapped(inner)
    for each in retrieve_all_functorch_interpreters():
        if isinstance(each, VmapInterpreter) and each.level() not in batched:
            size: Any = each.batch_size()
            true = lowered(torch.ones(size, dtype=torch.bool, device=tensor.device), 0)
            tensor = torch.where(functorch._add_batch_dim(true, 0, each.level()), tensor, 0)
    return tensor


def lowered(tensor: torch.Tensor, level: int | None = None) -> torch.Tensor:
    """``tensor`` without the wrappers of ``torch.func`` transforms that have ended, or that are
    above ``level``: by default the one that runs now.
    """
    functorch: Any = torch._C._functorch
    current = functorch.maybe_current_level() or 0 if level is None else level
    while functorch.is_functorch_wrapped_tensor(tensor) and (
        functorch.is_dead_tensor_wrapper(tensor) or functorch.maybe_get_level(tensor) > current
    ):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def below_current(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` below the transform that runs now, whose tangents and graph it has not."""
    functorch: Any = torch._C._functorch
    return lowered(tensor, (functorch.maybe_current_level() or 1) - 1)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.func`` transform wraps ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
