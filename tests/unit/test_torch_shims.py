"""Every private torch call that TorchRelay leans on still does what it leans on."""

from __future__ import annotations

import importlib.metadata
import inspect
import io
import itertools
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchrelay import _torch
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.errors import PeerLostError
from torchrelay.parameters import Table


def test_only_a_newer_torch_than_the_tested_ones_is_warned_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    major, minor = _torch.TESTED
    requirements = importlib.metadata.requires("torchrelay") or []
    assert f"torch<{major}.{minor + 1},>=2.11" in requirements
    for version in (torch.__version__, f"{major}.{minor}.1+cu132"):
        _torch.warn_if_untested(version)
    assert not recwarn
    with pytest.warns(UserWarning, match=f"up to {major}.{minor}, and this is torch 2.100.0a0"):
        _torch.warn_if_untested("2.100.0a0+git1234")


def test_a_profiler_shows_what_components_do() -> None:
    keys = torch.tensor([1])
    with torch.profiler.profile() as profile, Table.create(4, 2) as table:
        table.push(keys, torch.ones(1, 2))
        materialize_module(deferred_init(torch.nn.Linear, 2, 2))
    names = {event.name for event in profile.events()}
    assert {"torchrelay.parameters.push", "torchrelay.deferred.materialize_module"} <= names
    assert _torch.span("idle") is _torch.span("idle")  # one object, where nobody records


def test_operators_without_values_compute_shapes_of_ordinary_tensors() -> None:
    weight = torch.ones(2, 3)
    with _torch.without_values():
        found = torch.zeros(4, 2) @ weight
    assert _torch.is_fake(found) and found.shape == (4, 3)


def test_the_first_hook_sees_what_no_other_has_replaced() -> None:
    leaf, seen = torch.ones(2, requires_grad=True), list[torch.Tensor]()
    leaf.register_hook(lambda grad: 2 * grad)
    removed = _torch.first_hook(leaf, lambda grad: seen.append(-grad))
    _torch.first_hook(leaf, seen.append)
    leaf.sum().backward()
    assert [grad.tolist() for grad in seen] == [[1.0, 1.0], [-1.0, -1.0]]
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0]
    removed.remove()
    leaf.sum().backward()
    assert len(seen) == 3


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1, 5)[:, 0], torch.ones(2, 3), torch.tensor(1.0), torch.ones(0, 4)[:, 1]],
    ids=["one element of a row", "matrix", "scalar", "empty"],
)
def test_flat_bytes_share_the_memory_of_any_contiguous_tensor(tensor: torch.Tensor) -> None:
    found = _torch.flat_bytes(tensor)
    assert found.shape == (tensor.nbytes,) and found.dtype == torch.uint8
    found.zero_()
    assert not tensor.any()


def test_has_fast_bfloat16_follows_the_processor() -> None:
    assert isinstance(_torch.has_fast_bfloat16(), bool)


def test_callback_error_unwraps_what_a_callback_raised() -> None:
    def fail(_: torch.futures.Future[int]) -> int:
        raise PeerLostError("rank 1 has died;\nlook at its output")

    first: torch.futures.Future[int] = torch.futures.Future()
    second = first.then(fail)
    first.set_result(1)
    with pytest.raises(RuntimeError) as caught:
        second.wait()
    assert _torch.callback_error(caught.value) == (
        "PeerLostError",
        "rank 1 has died;\nlook at its output",
    )


def test_callback_error_leaves_other_errors_alone() -> None:
    assert _torch.callback_error(RuntimeError("out of memory: PeerLostError: no")) is None


def test_fake_mode_active_sees_modes_and_plain_torch_leaves_them() -> None:
    assert not _torch.fake_mode_active()
    with FakeTensorMode():
        assert _torch.fake_mode_active()
        with _torch.plain_torch():
            assert not _torch.fake_mode_active()
            assert type(torch.ones(2)) is torch.Tensor
    assert not _torch.fake_mode_active()


def test_plain_torch_is_without_autograd_and_inference() -> None:
    with torch.inference_mode(), _torch.plain_torch():
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert not torch.ones(2).is_inference()


def test_fake_mode_key_lets_a_dispatch_mode_see_absent_devices() -> None:
    class Mode(TorchDispatchMode):
        _mode_key = _torch.fake_mode_key

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **{**kwargs, "device": "meta"})

    with Mode():
        assert torch.ones(3, device="cuda").device.type == "meta"


def test_disabled_torch_function_leaves_only_dispatch() -> None:
    seen = []

    class Wrapped(torch.Tensor):
        __torch_function__ = _torch.disabled_torch_function  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return torch.zeros(3)

    one = torch.Tensor._make_wrapper_subclass(Wrapped, (3,))
    assert torch.equal(torch.neg(one), torch.zeros(3))
    assert seen == [torch.ops.aten.neg.default]


def test_recorded_modes_end_after_an_error() -> None:
    def fail(weight: torch.Tensor) -> None:
        with _torch.plain_torch(), _torch.recorded_modes(torch.float64, grad=True):
            assert torch.ones(1).dtype is torch.float64
            assert torch.is_grad_enabled() and not (weight * 2).requires_grad
            raise KeyError

    before = torch.get_default_dtype()
    with torch.no_grad():
        with pytest.raises(KeyError):
            fail(torch.ones(1, requires_grad=True))
        assert torch.get_default_dtype() is before and not torch.is_grad_enabled()


def test_default_generator_is_what_plain_draws_come_from() -> None:
    assert _torch.device_available(torch.device("cpu")) and not _torch.device_available(
        torch.device("hpu")
    )
    assert _torch.default_generator(torch.device("cpu")) is torch.default_generator
    assert _torch.default_generator(torch.device("hpu")) is torch.default_generator


def test_default_generators_are_those_of_devices_in_use() -> None:
    first, *others = _torch.default_generators()
    assert first is torch.default_generator
    assert len(others) == torch.cuda.is_initialized() * torch.cuda.device_count()


def test_default_generator_as_draws_from_another_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    mine = torch.Generator().manual_seed(2)
    with _torch.default_generator_as(mine):
        drawn = torch.rand(5)
    other = torch.Generator().manual_seed(2)
    assert torch.equal(drawn, torch.rand(5, generator=other))
    assert torch.equal(mine.get_state(), other.get_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_parse_to_understands_every_form_of_to() -> None:
    assert _torch.parse_to(torch.half) == (None, torch.half, False, None)
    assert _torch.parse_to("cuda:1", non_blocking=True) == (
        torch.device("cuda:1"),
        None,
        True,
        None,
    )
    assert _torch.parse_to("cpu", torch.half, memory_format=torch.channels_last) == (
        torch.device("cpu"), torch.half, False, torch.channels_last,
    )  # fmt: skip


def test_swap_tensors_exchanges_class_values_and_attributes_under_weak_references() -> None:
    one, other = torch.nn.Parameter(torch.ones(2)), torch.zeros(3)
    one.tag = "one"  # type: ignore[attr-defined]
    reference = weakref.ref(one)
    _torch.swap_tensors(one, other)
    assert (
        torch.equal(one, torch.zeros(3)) and type(one) is torch.Tensor and not hasattr(one, "tag")
    )
    assert isinstance(other, torch.nn.Parameter) and other.tag == "one" and other.requires_grad  # type: ignore[attr-defined]
    assert reference() is one


def test_a_local_box_is_cut_as_dtensor_does() -> None:
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        assert _torch.local_box((10, 3), mesh, [Shard(0)]) == ((6, 0), (3, 3))
        assert _torch.local_box((10, 3), mesh, [Replicate()]) == ((0, 0), (10, 3))
    finally:
        dist.destroy_process_group()


def test_trunc_normal_is_what_the_public_one_draws() -> None:
    torch.manual_seed(3)
    public = torch.nn.init.trunc_normal_(torch.empty(100), 0.5, 2.0, -1.0, 1.0)
    mine = _torch.trunc_normal(
        torch.empty(100), 0.5, 2.0, -1.0, 1.0, torch.Generator().manual_seed(3)
    )
    assert torch.equal(mine, public)


@pytest.mark.parametrize("caller", _torch.CALLERS)
def test_every_recognized_caller_exists_in_torch(caller: str) -> None:
    name, function = _torch.CALLERS[caller]
    found: Any = importlib.import_module(name)
    *path, last = function.replace("<locals>.", "").split(".")
    for part in path:
        found = getattr(found, part)
    if "<locals>" in function:
        code = inspect.unwrap(found).__code__
        assert last in [const.co_name for const in code.co_consts if inspect.iscode(const)]
    else:
        assert inspect.unwrap(getattr(found, last)).__code__.co_name == last


def test_frames_of_functions_with_the_same_name_are_not_recognized() -> None:
    def mesh_scatter() -> str | None:
        return _torch.caller_of(sys._getframe())

    assert mesh_scatter() is None


def test_caller_of_recognizes_fsdp1() -> None:
    frames = []

    class Asked(torch.nn.Linear):
        def buffers(self, recurse: bool = True) -> Any:
            frames.append(sys._getframe(1))
            return super().buffers(recurse)

    module = Asked(2, 2)
    _init_utils._need_to_materialize_module(module, set(), set())
    assert frames and all(_torch.caller_of(frame) == "fsdp1_needs_values" for frame in frames)
    assert _torch.caller_of(sys._getframe()) is None


def test_parameter_class_is_the_one_being_made() -> None:
    found = []

    class Watching(torch.Tensor):
        @property
        def _is_param(self) -> bool:
            return True

        @_is_param.setter
        def _is_param(self, value: bool) -> None:
            found.append(_torch.parameter_class())

    class Own(torch.nn.Parameter):
        pass

    made = torch.ones(2).as_subclass(Watching)
    torch.nn.Parameter(made)
    Own(made)
    made._is_param = True
    assert found == [torch.nn.Parameter, Own, None]


def test_lazy_caller_says_who_asks_for_memory() -> None:
    found: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.append(ask())
            return func(*args, **(kwargs or {}))

    def ask() -> Any:
        return two_deeper()

    def two_deeper() -> Any:
        return _torch.lazy_caller()

    lazy = torch.nn.UninitializedParameter()
    with Mode():
        torch.empty(0)
        torch.nn.UninitializedParameter()
        lazy.materialize((2, 2))
    assert found[0] is None
    assert any(one is torch.nn.UninitializedParameter for one in found)
    assert any(one is lazy for one in found)


def test_results_on_device_lay_linear_algebra_out_as_the_device_does() -> None:
    real = torch.linalg.svd(torch.rand(3, 4))

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), device="meta")

    shapes = _torch.results_on_device(
        torch.ops.aten._linalg_svd.default, (torch.rand(3, 4), True), {}, meta
    )
    assert [one.stride() for one in shapes[:3]] == [one.stride() for one in real]


def test_how_checkpoints_take_tensors_apart() -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    shard = _torch.CheckpointShard(whole[2:], (2, 0), whole.shape)
    assert _torch.sharding_of(whole) == "plain"
    assert _torch.sharding_of(torch.nn.Parameter(whole)) == "plain"
    assert _torch.sharding_of(shard) == "shards"
    ((box, local),) = _torch.local_shards(shard)
    assert box == ((2, 0), (2, 2))
    assert local is shard.local


def test_dcp_asks_a_reader_for_metadata_in_a_function_of_this_name() -> None:
    from torch.distributed.checkpoint import state_dict_loader

    source = inspect.getsource(state_dict_loader._load_state_dict)
    assert "def local_step" in source
    assert "metadata = storage_reader.read_metadata()" in source
    assert not _torch.is_dcp_loading(sys._getframe())


def test_watched_sees_profilers_and_dispatch_modes() -> None:
    assert not _torch.watched() and not _torch.profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.watched() and _torch.profiling()
    with FakeTensorMode():
        assert _torch.watched() and not _torch.profiling()
    assert not _torch.watched()


def test_dispatches_itself_tells_subclasses_with_operators_from_others() -> None:
    class Plain(torch.Tensor):
        pass

    assert not _torch.dispatches_itself(torch.ones(2))
    assert not _torch.dispatches_itself(torch.nn.Parameter(torch.ones(2)))
    assert not _torch.dispatches_itself(torch.ones(2).as_subclass(Plain))
    with FakeTensorMode():
        fake = torch.ones(2)
    assert _torch.dispatches_itself(fake)


def test_lowest_mode_comes_after_the_modes_that_are_active() -> None:
    order: list[str] = []

    class Mode(TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            order.append(self.name)
            return func(*args, **(kwargs or {}))

    with Mode("outer"), Mode("inner"):
        with _torch.lowest_mode(Mode("lowest")):
            torch.ones(1)
        assert order == ["inner", "outer", "lowest"]
        torch.ones(1)
    torch.ones(1)
    assert order[3:] == ["inner", "outer"]


def test_operator_results_has_the_form_of_the_schema() -> None:
    work = torch.distributed.Work()
    tensors = [torch.ones(2)]
    pair = _torch.operator_results(torch.ops.c10d.allreduce_.default, (tensors,), work)
    assert pair[0] is tensors and dist.Work.unbox(pair[1]) is work
    assert (
        dist.Work.unbox(_torch.operator_results(torch.ops.c10d.send.default, (tensors,), work))
        is work
    )


def test_backends_asked_reads_what_c10d_makes() -> None:
    seen: list[tuple[dict[str, str], Any]] = []

    def make(given: Any, options: Any) -> Any:
        found = _torch.backends_asked()
        assert found is not None
        seen.append(found)
        return dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)

    def asked() -> None:
        assert _torch.backends_asked() is None

    dist.Backend.register_backend("asks", make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("cpu:gloo,cuda:asks", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    asked()
    ((devices, group),) = seen
    assert list(devices.items()) == [("cpu", "gloo"), ("cuda", "asks")]
    assert torch.device("cpu") in group._device_types


def test_compiled_modules_and_parts_are_found() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert not _torch.is_compiled(plain)
    part: Any = torch.compile(plain, backend="eager")
    assert _torch.is_compiled(torch.nn.Sequential(part))
    plain[0].compile(backend="eager")
    assert _torch.is_compiled(plain)


def test_the_positions_of_exported_modules_are_found() -> None:
    plain, x = torch.nn.Bilinear(2, 2, 1), torch.ones(1, 2)
    assert _torch.exported_positions(plain) is None
    cases: list[tuple[Any, dict[str, Any], list[str]]] = [
        ((x, x), {}, ["input1", "input2"]),
        ((x,), {"input2": x}, ["input1"]),
        ((), {"input1": x, "input2": x}, []),
    ]
    for args, kwargs, names in cases:
        exported = torch.export.export(plain, args, kwargs).module()
        assert _torch.exported_positions(exported) == names


def test_a_storage_at_an_address_views_its_memory() -> None:
    memory = torch.arange(8, dtype=torch.float32)
    storage = _torch.storage_at(memory.data_ptr(), memory.nbytes, torch.device("cpu"))
    assert torch.empty(0).set_(storage, 2, (2,), (1,)).tolist() == [2.0, 3.0]


def test_a_weak_storage_is_that_of_one_memory_only() -> None:
    tensor = torch.ones(4)
    first = _torch.weak_storage(tensor)
    assert first == _torch.weak_storage(tensor[1:])
    for _ in range(4):  # the freed memory may be used again
        tensor.data = torch.ones(4)
        assert first != _torch.weak_storage(tensor)


def test_a_saved_tensor_is_found_in_its_file() -> None:
    whole = torch.arange(40.0).reshape(8, 5)
    for tensor in (
        whole[2:6].t(),
        torch.randn(7).bfloat16(),
        torch.ones(3, dtype=torch.float8_e5m2),
    ):
        file = io.BytesIO()
        file.write(b"before")
        torch.save(tensor, file)
        size_bytes = file.tell() - 6
        file.write(b"after")
        found, start = _torch.saved_tensor(file, 6, size_bytes)
        content = bytearray(file.getvalue()[6 + start :][: found.untyped_storage().nbytes()])
        memory = torch.frombuffer(content, dtype=found.dtype)
        read = memory.as_strided(found.shape, found.stride(), found.storage_offset())
        assert torch.equal(read.float(), tensor.float()) and read.dtype == tensor.dtype


def test_tensor_at_describes_memory_to_the_cuda_array_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def as_tensor(data: Any, device: torch.device) -> torch.Tensor:
        seen.append((data, device))
        return torch.zeros(1)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    owner = object()
    _torch.tensor_at(4096, 100, torch.device("cuda", 0), owner)
    ((array, device),) = seen
    assert array.owner is owner and device == torch.device("cuda", 0)
    described = array.__cuda_array_interface__
    assert (described["shape"], described["typestr"], described["data"]) == (
        (100,),
        "|u1",
        (4096, False),
    )


def test_group_store_is_where_a_group_met(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert _torch.group_store(dist.group.WORLD) is not None
        assert _torch.store_host(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
        assert _torch.store_host(dist.FileStore(str(tmp_path / "store"), 1)) is None
    finally:
        dist.destroy_process_group()


def test_a_timeout_is_set_through_what_stands_for_a_backend() -> None:
    given: list[timedelta] = []

    class Group(dist.ProcessGroup):
        _device_types = (torch.device("cpu"),)  # type: ignore[assignment]

        def _get_backend(self, _: torch.device) -> Any:
            return _torch.TimeoutOnly(given.append) if _torch.is_setting_timeout() else None

        def set_timeout(self, timeout: timedelta) -> None:  # what c10d calls since torch 2.14
            given.append(timeout)

    group = Group(0, 1)  # type: ignore[call-arg]
    assert group._get_backend(torch.device("cpu")) is None
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=3), group)
    assert given == [timedelta(seconds=3)]


def test_running_initializer_names_the_function_that_was_called() -> None:
    class Asks(torch.nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(_torch.running_initializer())
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[str | None] = []
    parameter = Asks(torch.empty(2, 3))
    names = [name for name in vars(torch.nn.init) if name[0] != "_" and name.endswith("_")]
    for name in set(names) - {"dirac_"}:  # which takes three dimensions
        seen.clear()
        arguments = {"constant_": (1.0,), "sparse_": (0.5,)}.get(name, ())
        getattr(torch.nn.init, name)(parameter, *arguments)
        assert set(seen) == {name}
    seen.clear()
    assert parameter.add(1).shape == parameter.shape
    assert seen and not any(seen)


def test_python_makes_backends_since_torch_2_14() -> None:
    has = _torch.has_python_backends()
    assert has == (torch.__version__ >= "2.14")
    if has:
        c10d: Any = torch._C._distributed_c10d
        kind = type("Mine", (c10d.Backend,), {"getBackendName": lambda self: "mine"})
        backend = kind(0, 1)
        group: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        assert group._get_backend(torch.device("cpu")) is backend and backend.name() == "mine"


def test_groups_by_name_and_backends_that_are_compared() -> None:
    seen: list[Any] = []

    def create(given: Any, _: object) -> Any:
        backend = dist.ProcessGroupGloo(
            given.store, given.group_rank, given.group_size, given.timeout
        )
        assert _torch.compared_backend(backend, given) is backend
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        seen.append(_torch.compared_backend(backend, given))
        dist.set_debug_level(dist.DebugLevel.OFF)
        return backend

    dist.Backend.register_backend("compares", create, extended_api=True, devices=["cpu"])
    dist.init_process_group("compares", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert _torch.group_named(dist.group.WORLD.group_name) is dist.group.WORLD
    assert _torch.group_named("none") is None
    dist.destroy_process_group()
    assert type(seen[0]).__name__ == "_ProcessGroupWrapper"


@pytest.mark.parametrize("factor", [2.5, torch.tensor([2.5])], ids=["number", "tensor"])
def test_premul_factor_is_what_the_op_was_made_with(factor: float | torch.Tensor) -> None:
    make: Any = torch._C._distributed_c10d._make_nccl_premul_sum
    assert _torch.premul_factor(make(factor)) == 2.5


def test_model_of_ddp_being_made_is_seen_by_a_module_that_is_asked_for_its_parameters() -> None:
    class Module(torch.nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(_torch.model_of_ddp_being_made())
            yield from super().named_parameters(*args, **kwargs)

    seen: list[torch.nn.Module | None] = []
    model = torch.nn.Sequential(Module(2, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
    assert model in seen
    seen.clear()
    list(model[0].parameters())
    assert seen == [None]


def test_graph_break_ends_a_compiled_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            _torch.graph_break("for a reason")
        return x + 1

    with pytest.raises(RuntimeError, match="for a reason"):
        torch.compile(function, fullgraph=True, backend="eager")(torch.ones(1))
    torch._dynamo.reset()
    assert torch.compile(function, backend="eager")(torch.ones(1)).item() == 2


class _Scripted:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class _Factor:
    factor = 3

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _scaled(x: torch.Tensor, by: _Factor) -> torch.Tensor:
    return by.scale(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_script_as_lets_scripted_code_take_another_class() -> None:
    torch.jit.script(_Scripted)
    _torch.script_as(_Factor, _Scripted)
    assert torch.jit.script(_scaled)(torch.ones(1), _Factor()).item() == 3


def test_the_compiler_skips_what_is_never_compiled() -> None:
    """Nor does it compile what such a function calls."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    ones = torch.ones(3)
    assert torch.equal(torch.compile(outer, backend=backend)(ones), outer(ones))
    assert len(compiled) == 1
    torch._dynamo.reset()
    skipped = torch.compile(_torch.never_compiled(outer), backend=backend)
    assert torch.equal(skipped(ones), outer(ones))
    assert len(compiled) == 1


def test_the_innermost_recomputed_checkpoint_is_identified() -> None:
    found: list[list[Any]] = [[], []]

    def inner(x: torch.Tensor) -> torch.Tensor:
        found[0].append(next(iter(_torch.recomputations()), None))
        return x.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        found[1].append(next(iter(_torch.recomputations()), None))
        return checkpoint(inner, x.sin(), use_reentrant=False).cos()

    x = torch.ones(2, requires_grad=True)
    checkpoint(outer, x, use_reentrant=False).sum().backward()
    assert found[0][0] is found[1][0] is None
    assert found[0][1] is found[1][1] is not None  # a segment in one that is recomputed
    assert found[0][2] not in (None, found[0][1])  # recomputed itself
    ended = weakref.ref(found[0][2])
    found.clear()
    assert ended() is None and not _torch.recomputations()
    found = [[], []]
    checkpoint(inner, x, use_reentrant=True).sum().backward()
    assert found[0] == [None, None]


def test_a_segment_is_recomputed_to_its_end() -> None:
    ended: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        _torch.recompute_whole()
        y = x.sin() * 2
        ended.append("inner")
        return y

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, x, use_reentrant=False)
        ended.append("outer")
        return y

    checkpoint(outer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert ended == ["inner", "outer"] * 2 + ["inner"]


def test_what_a_segment_computed_is_returned_when_it_is_recomputed() -> None:
    computed, returned = itertools.count(), list[int]()

    def inner(x: torch.Tensor) -> torch.Tensor:
        returned.append(_torch.computed_once(lambda: next(computed)))
        return x.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, x, use_reentrant=False)
        returned.append(_torch.computed_once(lambda: next(computed)))
        return checkpoint(inner, y.sin(), use_reentrant=False).cos()

    for order in ([0, 1, 2, 0, 1, 2, 2, 0], [3, 4, 5, 3, 4, 5, 5, 3]):
        assert not _torch.saved_by_hooks()
        checkpoint(outer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
        assert returned == order
        returned.clear()
    assert _torch.computed_once(lambda: next(computed)) == 6


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own use, in forward mode
def test_wrappers_of_transforms_are_removed_down_to_the_one_that_runs() -> None:
    kept: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        assert not _torch.in_forward_transform()
        kept.append(x)
        assert _torch.lowered(x) is x
        return x.square().sum()

    def outer(x: torch.Tensor) -> torch.Tensor:
        assert _torch.in_forward_transform()
        y = torch.func.grad(function)(x)
        inner = _torch.lowered(kept[-1])
        assert inner is not kept[-1] and _torch.is_transformed(inner)
        return y

    torch.func.jvp(outer, (torch.ones(2),), (torch.ones(2),))
    assert not _torch.is_transformed(_torch.lowered(kept[-1]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_transforms_can_be_seen_through() -> None:
    """Batch dimensions, grad mode below, and what has no part in the one that runs."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with _torch.outside_transforms():
            plain = torch.ones(2, requires_grad=True)
        assert plain.requires_grad and not _torch.is_transformed(plain)
        assert _torch.grad_modes() == [False, False, True]
        assert _torch.transform_depth() == 2
        assert not _torch.is_transformed(_torch.lowered(x, 0))
        below = _torch.below_current(x)
        assert below is not x and _torch.is_transformed(below)
        return (x * _torch.batched_by_all(plain.detach())).sum()

    with torch.no_grad():
        rows = torch.vmap(torch.func.grad(function))(torch.ones(3, 2))
        assert rows.tolist() == [[1.0, 1.0]] * 3
        same = torch.vmap(lambda x: _torch.batched_by_all(torch.ones(2)), out_dims=0)(rows)
        assert same.shape == (3, 2)
    assert _torch.grad_modes() == [True] and _torch.transform_depth() == 0
    with torch.autograd.forward_ad._set_fwd_grad_enabled(False), _torch.forward_mode_below():
        assert torch._C._is_fwd_grad_enabled()


def test_tensors_without_memory_are_none_of_the_host() -> None:
    zeros = torch._efficientzerotensor((2, 3))
    assert zeros.data_ptr() == 0 and not _torch.is_host_memory(zeros)
    assert _torch.is_host_memory(torch.zeros_like(zeros))
