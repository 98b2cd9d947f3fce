"""Torch functions that are recognized by their stack frames."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = [
    "CALLERS",
    "backward_is_of_product",
    "caller_of",
    "is_copying",
    "is_dcp_loading",
    "is_flattening",
    "is_setting_timeout",
    "lazy_caller",
    "model_of_ddp_being_made",
    "optimizer_taking_parameters",
    "parameter_class",
    "running_initializer",
]


#: Every torch function that is recognized by its stack frame, with its module.
CALLERS = {
    # They read is_meta before they compute, send or create initial values.
    "trunc_normal": ("torch.nn.init", "_no_grad_trunc_normal_"),
    "mesh_scatter": ("torch.distributed.tensor._collective_utils", "mesh_scatter"),
    "mesh_broadcast": ("torch.distributed.tensor._collective_utils", "mesh_broadcast"),
    "fsdp1_needs_values": ("torch.distributed.fsdp._init_utils", "_need_to_materialize_module"),
    # It asks whether its weights have memory of their own, before it moves them into one block.
    "flatten_parameters": ("torch.nn.modules.rnn", "RNNBase.flatten_parameters"),
    # They create parameters.
    "parameter": ("torch.nn.parameter", "Parameter.__new__"),
    "lazy_parameter": ("torch.nn.parameter", "UninitializedParameter.__new__"),
    "lazy_buffer": ("torch.nn.parameter", "UninitializedBuffer.__new__"),
    "lazy_materialize": ("torch.nn.parameter", "UninitializedTensorMixin.materialize"),
    # It makes a copy's tensor before the copy's memory.
    "deepcopy": ("torch._tensor", "Tensor.__deepcopy__"),
    # It has the outputs from which a backward pass starts.
    "backward": ("torch.autograd.graph", "_engine_run_backward"),
    # It replaces an error by an AssertionError.
    "dcp_load": (
        "torch.distributed.checkpoint.state_dict_loader",
        "_load_state_dict.<locals>.local_step",
    ),
    # They treat backends by their type, or do not pass on what they were asked for.
    "init": ("torch.distributed.distributed_c10d", "init_process_group"),
    "new_group": ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
    "set_timeout": ("torch.distributed.distributed_c10d", "_set_pg_timeout"),
    "ddp_parameters": (
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._build_params_for_reducer",
    ),
    # It does not notify a parameter that it will be stepped.
    "optimizer_parameters": ("torch.optim.optimizer", "Optimizer.add_param_group"),
}
_BY_FUNCTION: dict[str, list[str]] = {}
for _caller, (_, _function) in CALLERS.items():
    _BY_FUNCTION.setdefault(_function.rpartition(".")[2], []).append(_caller)


def caller_of(frame: FrameType) -> str | None:
    """Return the name in ``CALLERS`` of the function that ``frame`` executes, None if it has
    none.
    """
    for caller in _BY_FUNCTION.get(frame.f_code.co_name, ()):
        module, function = CALLERS[caller]
        owner, _, method = function.rpartition(".")
        if frame.f_globals.get("__name__") != module:
            continue
        is_method = owner and not owner.endswith("<locals>")
        if is_method and _code_of(module, owner, method) is not frame.f_code:
            continue
        return caller
    return None


@cache
def _code_of(module: str, owner: str, method: str) -> CodeType:
    found: Any = inspect.unwrap(getattr(getattr(sys.modules[module], owner), method))
    return found.__code__  # type: ignore[no-any-return]


def frame_of(callers: Collection[str], first: int, count: int = 1) -> FrameType | None:
    """Return the frame that executes one of ``callers``, names in ``CALLERS``.

    Looks at ``count`` frames, from the one that ``sys._getframe(first)`` returns in the caller.
    """
    frame: FrameType | None = sys._getframe(first + 1)
    for _ in range(count):
        if frame is None:
            break
        # Looking the name up first is what makes this cheap: most frames have none of these names.
        if frame.f_code.co_name in _BY_FUNCTION and caller_of(frame) in callers:
            return frame
        frame = frame.f_back
    return None


def is_copying() -> bool:
    """Return whether the operation that a dispatch mode receives is of a tensor's deep copy."""
    return frame_of(("deepcopy",), 3, 3) is not None


def lazy_caller() -> torch.Tensor | type | None:
    """Return the lazy module's parameter that asks for memory.

    Its class when it is created, itself when it gets its shape; None for other callers.
    """
    frame = frame_of(("lazy_parameter", "lazy_buffer", "lazy_materialize"), 3, 4)
    found: Any = frame and frame.f_locals.get("self", frame.f_locals.get("cls"))
    return found  # type: ignore[no-any-return]


def parameter_class() -> type[torch.nn.Parameter] | None:
    """Return the class being made, if the caller's caller is ``Parameter.__new__``."""
    frame = frame_of(("parameter",), 2)
    return frame and frame.f_locals["cls"]


def backward_is_of_product() -> bool:
    """Return whether a running backward pass starts from a product with a constant, such as what
    ``GradScaler.scale`` returns, or from a sum or quotient of those.
    """
    found = False
    for started in sys._current_frames().values():  # the passes of a device have their own threads
        frame: FrameType | None = started
        while frame is not None:
            if frame.f_code.co_name in _BY_FUNCTION and caller_of(frame) == "backward":
                for root in frame.f_locals["t_outputs"]:  # tensors, or edges of the graph
                    node = root.grad_fn if isinstance(root, torch.Tensor) else root.node
                    found |= _is_product(node)
            frame = frame.f_back
    return found


def _is_product(node: Any) -> bool:
    name = node.name() if node is not None else ""
    if name == "MulBackward0":
        return None in (inner for inner, _ in node.next_functions)
    return name in ("AddBackward0", "SubBackward0", "DivBackward0") and any(
        _is_product(inner) for inner, _ in node.next_functions
    )


def is_dcp_loading(frame: FrameType) -> bool:
    """Return whether ``frame`` is ``torch.distributed.checkpoint.load`` reading metadata."""
    return caller_of(frame) == "dcp_load"


def is_flattening() -> bool:
    """Return whether a recurrent layer asks for the address of a weight, in a comprehension (a
    frame before Python 3.12), by the method that calls this.
    """
    return frame_of(("flatten_parameters",), 2, 2) is not None


def is_setting_timeout() -> bool:
    """Return whether the caller's caller is c10d's function that sets the timeout of a group."""
    return frame_of(("set_timeout",), 2) is not None


def running_initializer() -> str | None:
    """Return the function of ``torch.nn.init`` that uses the tensor whose ``__torch_function__``
    calls this, if one does.
    """
    frame: FrameType | None = sys._getframe(2)
    name = None
    for _ in range(_INITIALIZER_DEPTH):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.nn.init":
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


# Frames from a use of a tensor to the initializer that the user called: wrappers of dispatch and of
# no_grad, functions that initializers share.
_INITIALIZER_DEPTH = 6


def optimizer_taking_parameters() -> torch.optim.Optimizer | None:
    """Return the optimizer, if ``Optimizer.add_param_group`` uses the tensor whose
    ``__torch_function__`` calls this.
    """
    frame = frame_of(("optimizer_parameters",), 2)
    return frame and frame.f_locals["self"]


def model_of_ddp_being_made() -> torch.nn.Module | None:
    """Return the model, if DistributedDataParallel's constructor is collecting parameters."""
    # A generator, a comprehension (a frame before Python 3.12), the method.
    frame = frame_of(("ddp_parameters",), 1, 4)
    return frame and frame.f_locals["self"].module
