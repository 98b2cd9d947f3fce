"""Private and version-bound torch calls.

``tests/unit/test_torch_shims.py`` checks each on the versions of ``docs/compatibility.md``.

Tensor subclasses and dispatch modes of ``deferred`` use some private names directly
(``_make_wrapper_subclass``, ``DispatchKey``, ``torch.utils._python_dispatch``, ``_local_tensor``).
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import inspect
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.autograd.forward_ad
from torch.utils import _python_dispatch

from torchrelay.errors import UnsupportedError

__all__ = [
    "CALLERS",
    "TESTED",
    "BackendsAsked",
    "CheckpointShard",
    "TimeoutOnly",
    "after_backward",
    "apply_of",
    "backends_asked",
    "backward_id",
    "backward_keeps_graph",
    "backward_will_run",
    "callback_error",
    "caller_of",
    "default_dtype",
    "default_generator",
    "default_generator_as",
    "device_available",
    "disabled_torch_function",
    "dispatches_itself",
    "fake_mode_active",
    "fake_mode_key",
    "find_torchdistx",
    "flat_bytes",
    "forward_mode_active",
    "gloo_group",
    "grad_asked",
    "graph_break",
    "group_store",
    "has_fast_bfloat16",
    "has_fsdp2",
    "has_saving_hooks",
    "inner_tensors",
    "is_copying",
    "is_dcp_loading",
    "is_plain",
    "is_setting_timeout",
    "is_transformed",
    "lazy_caller",
    "local_blocks",
    "local_shape_and_offset",
    "local_shards",
    "lowest_mode",
    "make_ordered",
    "meet_without_variables",
    "model_of_ddp_being_made",
    "name_backend",
    "never_compiled",
    "operator_results",
    "optimizer_taking_parameters",
    "parameter_class",
    "parse_to",
    "plain_torch",
    "premul_factor",
    "profiling",
    "results_on_device",
    "running_initializer",
    "script_as",
    "set_bits",
    "sharding_of",
    "span",
    "store_host",
    "strip_dead_transform",
    "swap_tensors",
    "tensor_at",
    "transform_kinds",
    "transforms_active",
    "trunc_normal",
    "warn_if_untested",
    "watched",
]


# The newest minor version that the tests were run on; pyproject.toml excludes newer ones.
TESTED = (2, 15)


def warn_if_untested(version: str) -> None:
    """Warn if ``version`` of torch is newer than what the tests were run on."""
    if tuple(map(int, version.split(".")[:2])) > TESTED:
        newest = ".".join(map(str, TESTED))
        warnings.warn(
            f"torchrelay was tested with torch up to {newest}, and this is torch {version}; if "
            f"something fails, try torch {newest}",
            stacklevel=2,
        )


warn_if_untested(torch.__version__)


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices faster than float32 ones."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


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


def forward_mode_active() -> bool:
    """Whether a forward-mode dual level is open."""
    return torch.autograd.forward_ad._current_level >= 0


def transform_kinds() -> frozenset[str]:
    """The kinds of the active ``torch.func`` transforms: Grad, Jvp, Vmap. Checked on 2.13."""
    functorch: Any = torch._C._functorch
    return frozenset(each.key().name for each in functorch.get_interpreter_stack() or ())


def strip_dead_transform(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the wrappers of ``torch.func`` transforms that have ended."""
    functorch: Any = torch._C._functorch
    while functorch.is_dead_tensor_wrapper(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.func`` transform wraps ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


# For a tensor subclass that leaves torch functions alone and only wants dispatch.
disabled_torch_function = torch._C._disabled_torch_function_impl

# The slot of a dispatch mode that may be called for absent devices.
fake_mode_key = torch._C._TorchDispatchModeKey.FAKE


def fake_mode_active() -> bool:
    """Whether some fake tensor mode is on in this thread."""
    return torch._C._get_dispatch_mode(fake_mode_key) is not None


_modes: Any = torch._C._len_torch_dispatch_stack
_pre_dispatch_modes: Any = torch._ops._mode_stack_state_for_pre_dispatch.count
_inference_mode: Any = torch._C._InferenceMode
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_autocast_enabled: Any = torch._C._is_any_autocast_enabled
_without_autocast: Any = torch._C._DisableAutocast


def is_plain() -> bool:
    """Whether operations on tensors without gradients do what their name says: no dispatch mode,
    no inference mode, no autocast.
    """
    return not (
        _modes()
        or _pre_dispatch_modes()
        or torch.is_inference_mode_enabled()
        or _autocast_enabled()
    )


class plain_torch:  # noqa: N801
    """No dispatch mode, no autograd, no autocast: operations do what their name says.

    This and the next two are classes, because replays enter them for each operation:
    ``contextmanager`` and torch's own contexts cost many times as much.
    """

    __slots__ = ("_autocast", "_grad", "_inference", "_modes")

    def __enter__(self) -> None:
        self._modes: Any = None
        self._autocast: Any = None
        if _modes() or _pre_dispatch_modes():
            self._modes = _python_dispatch._disable_current_modes()
            self._modes.__enter__()
        if _autocast_enabled():
            self._autocast = _without_autocast()
            self._autocast.__enter__()
        self._grad = torch.is_grad_enabled()
        self._inference = _inference_mode(False)
        self._inference.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._inference.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._grad)
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)


class default_dtype:  # noqa: N801
    """Set the default dtype within the block."""

    __slots__ = ("_before", "_dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._before is not self._dtype:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        if self._before is not self._dtype:
            torch.set_default_dtype(self._before)


class grad_asked:  # noqa: N801
    """Within :class:`plain_torch`: no autograd, but kernels that ask whether gradients are enabled
    see ``enabled``.
    """

    __slots__ = ("_below", "_enabled")

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._below = _below_autograd()
            self._below.__enter__()
            torch._C._set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        if self._enabled:
            torch._C._set_grad_enabled(False)
            self._below.__exit__(None, None, None)


def device_available(device: torch.device) -> bool:
    """Whether this machine has ``device``."""
    if device.type in ("cpu", "meta"):
        return True
    module = getattr(torch, device.type, None)
    return bool(
        module is not None and module.is_available() and (device.index or 0) < module.device_count()
    )


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on ``device`` draw from if given none.

    For a device that is absent here: a CPU generator of its own, with the seed that ``manual_seed``
    set.
    """
    if device.type != "cpu" and device_available(device):
        module = getattr(torch, device.type)
        module.init()  # there are no default generators before
        index = module.current_device() if device.index is None else device.index
        return module.default_generators[index]  # type: ignore[no-any-return]
    if device.type == "cpu":
        return torch.default_generator
    return torch.Generator().manual_seed(torch.default_generator.initial_seed())


@contextmanager
def default_generator_as(generator: torch.Generator) -> Iterator[None]:
    """Let the default generator of the device draw from ``generator`` in the block."""
    default = default_generator(generator.device)
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
        generator.set_state(default.get_state())
    finally:
        default.set_state(before)


def set_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> None:
    """Set what torch remembers about a lazy conjugate or negative, without computing."""
    torch._C._set_conj(tensor, conj)
    torch._C._set_neg(tensor, neg)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor``, or the plain tensors that a traceable wrapper subclass is made of."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: PLC0415

    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return [tensor]
    names, _ = wrapper.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def parts_of(tensor: torch.Tensor) -> tuple[Sequence[str], Any] | None:
    """Return what a traceable wrapper subclass is made of: the names of its tensors, and the other
    value it needs; None for other tensors.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: PLC0415

    wrapper: Any = tensor
    return wrapper.__tensor_flatten__() if is_traceable_wrapper_subclass(wrapper) else None


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective once it is there; others unchanged."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    return tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is one of torch's own fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415

    return isinstance(tensor, FakeTensor)


def find_torchdistx() -> None:
    """Let FSDP1 find ``torchdistx`` if there was none when it was imported."""
    fsdp1: Any = sys.modules.get("torch.distributed.fsdp._init_utils")
    if fsdp1 is None or fsdp1._TORCHDISTX_AVAIL:
        return
    for name in ("deferred_init", "fake"):
        setattr(fsdp1, name, importlib.import_module(f"torchdistx.{name}"))
    fsdp1._TORCHDISTX_AVAIL = True


def has_fsdp2(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module`` or to a part of it."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    return any(isinstance(one, FSDPModule) for one in module.modules())


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Device, dtype, non_blocking and memory format out of the arguments of ``Tensor.to``."""
    return torch._C._nn._parse_to(*args, **kwargs)


def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two objects' contents; weak references and views stay.

    ``torch.utils.swap_tensors`` refuses tensors that have weak references, as in recurrent layers.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


class _CudaArray:
    """Device memory with the CUDA array interface; keeps `owner` alive."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, size_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return the `size_bytes` bytes at `address` of a CUDA `device` as a uint8 tensor that keeps
    `owner` alive.

    The public way; ``torch._C._construct_storage_from_data_pointer`` keeps nothing alive.
    """
    return torch.as_tensor(_CudaArray(address, size_bytes, owner), device=device)


def storage_at(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage over the bytes at `address`, which the caller keeps mapped. Checked on 2.11
    to 2.15.
    """
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    return made  # type: ignore[no-any-return]


def is_viewed(storage: torch.UntypedStorage) -> bool:
    """Return whether anything but `storage` itself, such as a tensor or an array, refers to its
    memory. Checked on 2.11 to 2.15.
    """
    return torch._C._storage_Use_Count(storage._cdata) > 1


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` or ``Module.compile`` was called for `module` or a part of
    it. Checked on 2.13.
    """
    return any(
        type(one).__name__ == "OptimizedModule" or one._compiled_call_impl is not None
        for one in module.modules()
    )


def callback_error(error: RuntimeError) -> tuple[str, str] | None:
    """Return type name and message of the exception of a future's callback.

    None if ``error`` wraps none. DistributedDataParallel waits in C++, which keeps only the text.
    """
    wrapped = r"when running the callback: (?:[\w.]+\.)?(\w+): (.*?)\s*(?:\n\nAt:|$)"
    found = re.search(wrapped, str(error), re.DOTALL)
    return (found[1], found[2]) if found else None


class CheckpointShard(torch.Tensor):
    """A block of rows of a larger tensor that Distributed Checkpoint saves and loads.

    It has the larger tensor's size and implements DCP's own protocol
    (``torch.distributed._checkpointable``); computing with it is an error. ``local`` is this rank's
    block, at ``offsets`` of the whole.
    """

    local: torch.Tensor
    offsets: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, offsets: tuple[int, ...], size: torch.Size, *_: Any
    ) -> CheckpointShard:
        self: CheckpointShard = torch.Tensor._make_wrapper_subclass(cls, size, dtype=local.dtype)
        self.local, self.offsets = local, offsets
        return self

    def __init__(self, local: torch.Tensor, offsets: tuple[int, ...], size: torch.Size) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].size()):
            # DCP stages an asynchronous save: it copies the attributes into an empty tensor of the
            # same kind.
            return cls(torch.empty_like(args[0].local), args[0].offsets, args[0].size())
        raise UnsupportedError(
            f"{func}: a {cls.__name__} is for checkpoints only; compute with its .local"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        shape, of = tuple(self.local.shape), tuple(self.size())
        return f"{type(self).__name__}(offsets={self.offsets}, {shape=}, {of=})"

    def _chunk(self) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.size())

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
        from torch.distributed.checkpoint.planner import (  # noqa: PLC0415
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        chunk = self._chunk()
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self.local),
            size=self.size(),
        )
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data
            )
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: object) -> torch.Tensor:
        return self.local


def local_shape_and_offset(
    shape: Any, mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the offset of this rank's part of a distributed tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def trunc_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any
) -> torch.Tensor:
    """``nn.init.trunc_normal_`` without its check for torch functions."""
    return torch.nn.init._no_grad_trunc_normal_(tensor, mean, std, a, b, generator=generator)


#: Every torch function that is recognized by its stack frame, with its module.
CALLERS = {
    # They read is_meta before they compute, send or create initial values.
    "trunc_normal": ("torch.nn.init", "_no_grad_trunc_normal_"),
    "mesh_scatter": ("torch.distributed.tensor._collective_utils", "mesh_scatter"),
    "mesh_broadcast": ("torch.distributed.tensor._collective_utils", "mesh_broadcast"),
    "fsdp1_needs_values": ("torch.distributed.fsdp._init_utils", "_need_to_materialize_module"),
    # They create parameters.
    "parameter": ("torch.nn.parameter", "Parameter.__new__"),
    "lazy_parameter": ("torch.nn.parameter", "UninitializedParameter.__new__"),
    "lazy_buffer": ("torch.nn.parameter", "UninitializedBuffer.__new__"),
    "lazy_materialize": ("torch.nn.parameter", "UninitializedTensorMixin.materialize"),
    # It makes a copy's tensor before the copy's memory.
    "deepcopy": ("torch._tensor", "Tensor.__deepcopy__"),
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
        if owner and not owner.endswith("<locals>"):
            found: Any = inspect.unwrap(getattr(getattr(sys.modules[module], owner), method))
            if found.__code__ is not frame.f_code:
                continue
        return caller
    return None


def never_compiled(function: Callable[..., Any]) -> Any:
    """Keep torch's compiler away from ``function`` and all that it calls, without importing it, as
    ``torch.compiler.disable`` does.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 tensor that shares its memory."""
    # reshape(-1) keeps the stride of a single element, with which it cannot be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_copying() -> bool:
    """Return whether the operation that a dispatch mode receives is of a tensor's deep copy.
    Checked on 2.13 and 2.15.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(3):
        if frame is None:
            return False
        if caller_of(frame) == "deepcopy":
            return True
        frame = frame.f_back
    return False


def lazy_caller() -> torch.Tensor | type | None:
    """Return the lazy module's parameter that asks for memory.

    Its class when it is created, itself when it gets its shape; None for other callers.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            return None
        if caller_of(frame) in ("lazy_parameter", "lazy_buffer", "lazy_materialize"):
            found: Any = frame.f_locals.get("self", frame.f_locals.get("cls"))
            return found  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


def parameter_class() -> type[torch.nn.Parameter] | None:
    """The class being made, if the caller's caller is ``Parameter.__new__``."""
    frame = sys._getframe(2)
    return frame.f_locals["cls"] if caller_of(frame) == "parameter" else None


def results_on_device(
    func: Any, args: Any, kwargs: Any, shadow: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """The results of ``func`` on fake tensors of torch, which know their device."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: PLC0415
    from torch.utils._pytree import tree_map_only  # noqa: PLC0415

    mode = FakeTensorMode()
    with mode:
        args = tree_map_only(torch.Tensor, lambda t: FakeTensor(mode, shadow(t), t.device), args)
        return func(*args, **kwargs)


def is_dcp_loading(frame: FrameType) -> bool:
    """Whether ``frame`` is ``torch.distributed.checkpoint.load`` reading metadata."""
    return caller_of(frame) == "dcp_load"


def sharding_of(tensor: torch.Tensor) -> str:
    """Return how a checkpoint divides ``tensor``: "dtensor", "shards" or "plain".

    Shards are those of a ShardedTensor or of a class with ``torch.distributed._checkpointable``.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return "plain"
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if isinstance(tensor, DTensor):
        return "dtensor"
    if isinstance(tensor, ShardedTensor) or hasattr(tensor, "__create_chunk_list__"):
        return "shards"
    return "plain"


def local_shards(tensor: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return offsets and local tensor of each block of this rank.

    For a ShardedTensor, or a tensor of a class with ``torch.distributed._checkpointable``.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415

    if hasattr(tensor, "__create_chunk_list__"):
        return [
            (
                tuple(chunk.offsets),
                tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets, index)),
            )
            for index, chunk in enumerate(tensor.__create_chunk_list__())
        ]
    return [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()]


Block = tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]


def local_blocks(tensor: Any) -> list[Block]:
    """Return the blocks of the global tensor that form this rank's part of a DTensor.

    One, unless a strided shard (FSDP over tensor parallelism, with uneven sizes) interleaves: then
    one per run. Each has offsets, sizes and its position in the local tensor.
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    sizes, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    strided = {p.dim for p in tensor.placements if isinstance(p, _StridedShard)}
    blocks: list[Block] = [(tuple(offsets), tuple(sizes), tuple(slice(0, size) for size in sizes))]
    for dim in sorted(strided):
        runs = _runs(_indices_along(tensor, dim))
        blocks = [
            (
                (*offsets[:dim], start, *offsets[dim + 1 :]),
                (*sizes[:dim], length, *sizes[dim + 1 :]),
                (*within[:dim], slice(first, first + length), *within[dim + 1 :]),
            )
            for offsets, sizes, within in blocks
            for start, first, length in runs
        ]
    return blocks


def _indices_along(tensor: Any, dim: int) -> list[int]:
    """Which indices of dimension ``dim`` this rank has, in the order in which it has them."""
    held = torch.arange(tensor.shape[dim])
    coordinate = tensor.device_mesh.get_coordinate()
    for mesh_dim, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dim:
            strided = (
                {"split_factor": placement.split_factor}
                if hasattr(placement, "split_factor")
                else {}
            )
            along = type(placement)(0, **strided)
            pieces, _ = along._split_tensor(
                held, tensor.device_mesh.size(mesh_dim), with_padding=False
            )
            held = pieces[coordinate[mesh_dim]]
    return held.tolist()


def _runs(indices: list[int]) -> list[tuple[int, int, int]]:
    """Each run of successive indices: its first value, its position, its length."""
    runs: list[tuple[int, int, int]] = []
    for position, index in enumerate(indices):
        if runs and index == runs[-1][0] + runs[-1][2]:
            start, first, length = runs[-1]
            runs[-1] = start, first, length + 1
        else:
            runs.append((index, position, 1))
    return runs or [(0, 0, 0)]


# Whether a profiler records this thread.
profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
_no_dispatch = torch.Tensor.__torch_dispatch__


_NO_SPAN = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that a running profiler shows under ``name``. It costs almost nothing if
    no profiler runs.
    """
    return torch.profiler.record_function(name) if profiling() else _NO_SPAN


def watched() -> bool:
    """Whether a profiler or a dispatch mode looks at this thread's operators."""
    return profiling() or _modes_active() > 0


def dispatches_itself(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a subclass that handles operators itself, such as DTensor."""
    return type(tensor).__torch_dispatch__ is not _no_dispatch


@contextmanager
def lowest_mode(mode: Any) -> Iterator[None]:
    """Activate ``mode`` below every dispatch mode that is active now: it sees operators last."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode  # noqa: PLC0415

    above = [_pop_mode() for _ in range(_modes_active())]
    _push_mode(mode)
    for other in reversed(above):
        _push_mode(other)
    try:
        yield
    finally:
        for _ in range(len(above) + 1):
            _pop_mode()
        for other in reversed(above):
            _push_mode(other)


def operator_results(operator: Any, args: Any, work: Any) -> Any:
    """Return what a c10d operator returns: its first tensors, if it returns some, and ``work``."""
    results = [
        work.boxed() if result.type.kind() == "ClassType" else args[0]
        for result in operator._schema.returns
    ]
    return tuple(results) if len(results) != 1 else results[0]


@dataclass(frozen=True)
class BackendsAsked:
    """The backends of a group that c10d is making, while one of them is being made."""

    text: str
    devices: dict[str, str]  # device type: backend, in c10d's order
    group: Any  # the plain ProcessGroup in which c10d has registered the backends made so far
    store: Any

    @property
    def missing(self) -> dict[str, str]:
        """Backends other than ``sml`` that are not registered yet."""
        made = {device.type for device in self.group._device_types}
        return {d: name for d, name in self.devices.items() if name != "sml" and d not in made}


def backends_asked() -> BackendsAsked | None:
    """Return the backends that c10d was asked for, if it is the caller's caller.

    Raises:
        UnsupportedError: this torch creates groups in an unknown way.
    """
    frame = sys._getframe(2)
    if caller_of(frame) != "new_group":
        return None
    found = frame.f_locals
    try:
        devices = dict(found["backend_config"].get_device_backend_map())
        return BackendsAsked(str(found["backend"]), devices, found["pg"], found["prefix_store"])
    except KeyError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} makes process groups in an unknown way"
        ) from error


def meet_without_variables(backend: str, meet: Callable[[datetime.timedelta], Any]) -> None:
    """Let ``init_process_group(backend)`` find its ranks with ``meet`` if neither RANK nor
    WORLD_SIZE is set, where torch raises an error.

    ``meet`` takes a timeout, and returns store, rank and size. Other backends, and calls that give
    a rank, a size, a store or another ``init_method``, get what torch does.
    """
    handlers: Any = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    by_variables = handlers["env"]

    def by_variables_or_meet(url: str, **kwargs: Any) -> Any:
        has_variables = "RANK" in os.environ or "WORLD_SIZE" in os.environ
        if has_variables or url != "env://" or backend not in _backends_of_init():
            return by_variables(url, **kwargs)
        return iter([meet(kwargs["timeout"])])

    handlers["env"] = by_variables_or_meet


def _backends_of_init() -> list[str]:
    """Return the backends in the string given to the ``init_process_group`` that runs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and caller_of(frame) != "init":
        frame = frame.f_back
    return [] if frame is None else re.split("[:,]", str(frame.f_locals["backend"]))


def group_store(group: Any) -> Any:
    """The store over which a process group was made."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    return distributed_c10d._get_process_group_store(group)


def store_host(store: Any) -> str | None:
    """The host that serves ``store``, if it is a TCP store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def is_setting_timeout() -> bool:
    """Whether the caller's caller is c10d's function that sets the timeout of a group."""
    return caller_of(sys._getframe(2)) == "set_timeout"


def running_initializer() -> str | None:
    """The function of ``torch.nn.init`` that uses the tensor whose ``__torch_function__`` calls
    this, if one does.
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
    """The optimizer, if ``Optimizer.add_param_group`` uses the tensor whose ``__torch_function__``
    calls this.
    """
    frame = sys._getframe(2)
    return frame.f_locals["self"] if caller_of(frame) == "optimizer_parameters" else None


class TimeoutOnly:
    """Stands for a backend where c10d sets a timeout, which it does for Gloo and NCCL only."""

    __class__ = property(lambda _: torch.distributed.ProcessGroupGloo)  # what isinstance asks

    def __init__(self, set_timeout: Callable[[datetime.timedelta], None]) -> None:
        self._set_default_timeout = set_timeout


def name_backend(group: Any, name: str) -> None:
    """Let c10d find the default backend of ``group``, a Python subclass of ProcessGroup.

    Since 2.15 c10d attaches its flight recorder to each group, and asks the default backend what it
    supports; this one supports nothing beyond what the group does itself. Before 2.14 Python cannot
    make a Backend, and no code asks for one.
    """
    c10d: Any = torch._C._distributed_c10d
    if not hasattr(c10d, "FlightRecorderHook"):
        return

    class Named(c10d.Backend):  # type: ignore[misc]
        def getBackendName(self) -> str:  # noqa: N802 - c10d calls it
            return name

    kind = c10d.ProcessGroup.BackendType.CUSTOM
    plain = c10d.ProcessGroup
    plain._register_backend(group, torch.device("cpu"), kind, Named(group.rank(), group.size()))
    plain._set_default_backend(group, kind)


def premul_factor(op: Any) -> float:
    """The factor of a PREMUL_SUM; torch has an attribute for it only since 2.13."""
    return float(op.__getstate__()[1])


def gloo_group(store: Any, rank: int, size: int, timeout_s: float, address: str) -> Any:
    """Return a private Gloo group that listens at ``address``; its collectives take lists of
    tensors.
    """
    dist: Any = torch.distributed
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    _gloo_groups.add(group)
    return group


_gloo_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_gloo_groups() -> None:
    """Never destroy the groups in this process: that would wait for threads of the parent."""
    for group in _gloo_groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_gloo_groups)


def model_of_ddp_being_made() -> torch.nn.Module | None:
    """The model, if DistributedDataParallel's constructor is collecting parameters."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(4):  # a generator, a comprehension (a frame before Python 3.12), the method
        if frame is None:
            return None
        if caller_of(frame) == "ddp_parameters":
            return frame.f_locals["self"].module  # type: ignore[no-any-return]
        frame = frame.f_back
    return None
