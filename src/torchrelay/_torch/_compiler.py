"""``torch.compile``, custom operators and TorchScript."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "exported_positions",
    "graph_break",
    "is_compiled",
    "make_ordered",
    "never_compiled",
    "script_as",
]


def exported_positions(module: torch.nn.Module) -> list[str] | None:
    """Return the names of the arguments that a module of ``torch.export`` takes by position only;
    None of another module.
    """
    spec: Any = getattr(module, "_in_spec", None)
    if spec is None or not isinstance(module, torch.fx.GraphModule):
        return None
    return list(inspect.signature(module.forward).parameters)[: spec.child(0).num_children]


def make_ordered(operator: Any) -> None:
    """Give an operator of ``torch.library.custom_op`` an ordered effect."""
    library: Any = torch.library
    if hasattr(operator, "register_effect"):
        operator.register_effect(library.EffectType.ORDERED)


def graph_break(reason: str) -> None:
    """Break the graph that ``torch.compile`` traces: what follows runs outside of it."""
    dynamo: Any = torch._dynamo
    dynamo.graph_break(reason)


def script_as(python_class: type, scripted: type) -> None:
    """Let TorchScript treat ``python_class`` as ``scripted``.

    Both have the same attributes; ``scripted`` was scripted where its annotations are known.
    """
    state: Any = torch.jit._state
    state._add_script_class(python_class, state._get_script_class(scripted))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` or ``Module.compile`` was called for `module` or a part of
    it.
    """
    return any(
        type(one).__name__ == "OptimizedModule" or one._compiled_call_impl is not None
        for one in module.modules()
    )


def never_compiled(function: Callable[..., Any]) -> Any:
    """Keep torch's compiler away from ``function`` and all that it calls, without importing it, as
    ``torch.compiler.disable`` does.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
