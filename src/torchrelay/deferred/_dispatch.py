"""Execution of operations on fake tensors: for real, on shapes only, or recorded.

Shapes come from torch's meta kernels on meta tensors of the same shape and stride; common
initialisers take shorter paths.
"""

from __future__ import annotations

import operator as operators
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay import _torch
from torchrelay.deferred import _recording as sessions
from torchrelay.deferred import _results as made
from torchrelay.deferred._graph import flat, map_tensors
from torchrelay.deferred._operators import Operator, describe, trunc_normal
from torchrelay.deferred._recording import FakeSession, record
from torchrelay.deferred._tensor import FakeTensor, fake_from_region
from torchrelay.deferred._values import ahead, by_value, for_real, read_values
from torchrelay.errors import DeferredError, TorchRelayError, UnsupportedError

__all__ = ["enter"]

aten = torch.ops.aten

Handler = Callable[[Any, Operator, tuple[Any, ...], dict[str, Any]], Any]
# Why torch cannot take a tensor without memory past the operators, and what to do instead, with
# deferred_init and with fake_mode.
_REFUSALS: dict[str, tuple[type[TorchRelayError], str, str]] = {
    "memory": (
        DeferredError,
        "A function of torch needs the memory of a deferred tensor, as those do that take sizes or "
        "indices in a tensor, or read its storage; give it numbers, such as tolist() returns.",
        "A function of torch needs the memory of a fake tensor, as those do that take sizes or "
        "indices in a tensor, or read its storage; give it numbers, or call it outside of "
        "fake_mode.",
    ),
    "subclass": (
        UnsupportedError,
        "A class of tensors that is made by _make_subclass takes the memory of a tensor, and "
        "cannot be deferred; make the module outside of deferred_init.",
        "A class of tensors that is made by _make_subclass takes the memory of a tensor, and "
        "cannot be fake; make the tensor outside of fake_mode.",
    ),
}


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Receives every operation, also those without a fake argument. One per thread."""

    # Lets calls for absent devices through torch's argument parsing, as they are not going to be
    # touched.
    _mode_key = _torch.fake_mode_key

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping each call, for which it would import its compiler."""
        return False

    @_torch.never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if not issubclass(kind, FakeTensor) and _dispatches(kind):
                return NotImplemented  # a tensor subclass takes its own part first
        return dispatch(func, args, kwargs or {})


def _dispatches(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@contextmanager
def enter(session: FakeSession) -> Iterator[None]:
    """Make ``session`` the innermost of this thread; the caller closes it.

    Raises:
        DeferredError, UnsupportedError: torch took a tensor of the block past the operators.
    """
    active = sessions.active()
    mode: _Mode | None = None
    if not active:
        if _torch.fake_mode_active():
            raise UnsupportedError(
                "A torch.export or torch.compile fake mode is active here; leave it before making "
                "fake tensors."
            )
        mode = _Mode()  # type: ignore[no-untyped-call]
        mode.__enter__()  # type: ignore[no-untyped-call]
    active.append(session)
    try:
        yield
    except RuntimeError as error:
        refusal = _REFUSALS.get(_torch.what_fails_without_memory(error))
        if refusal is None:
            raise
        kind, *sentences = refusal
        raise kind(sentences[not session.deferred]) from error
    finally:
        active.pop()
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class DispatchingTensor(FakeTensor):
    """The fake tensor as a program sees it: operations on it are executed here.

    Its methods that ask for values give those of a deferred tensor to the program that is being
    recorded.
    """

    @classmethod
    @_torch.never_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __format__(self, spec: str) -> str:
        is_parameter = isinstance(self, torch.nn.Parameter)
        if self.dim() == 0 and (spec or self._region.storage.deferred) and not is_parameter:
            return format(self._read("formatting").item(), spec)
        return object.__format__(self, spec)

    def numpy(self, *, force: bool = False) -> Any:
        if not sessions.recording():
            self.refuse("numpy()")
        values = self._read("numpy()").numpy(force=force)
        values.flags.writeable = False  # a write to this copy would be lost
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        values = self.numpy(force=True)
        return values.astype(values.dtype if dtype is None else dtype, copy=bool(copy))

    def tolist(self) -> Any:
        return self._read("tolist()").tolist()

    # torch.tensor([a, b]) asks its elements for numbers where no operation is dispatched.

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def __bool__(self) -> bool:
        return bool(self._number())

    def __index__(self) -> int:
        return operators.index(self._number())

    def _number(self) -> Any:
        values = self._read("a number")
        return values.item() if values.numel() == 1 else bool(values)  # raises what torch raises

    def _read(self, what: str) -> torch.Tensor:
        if not self._region.storage.deferred:
            self.refuse(what)
        return read_values(self)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """The answer to a function of torch that asks before it draws, sends or creates.

        Neither True nor False is right everywhere: ``trunc_normal_`` draws until nothing is
        rejected, which needs values, and is recorded as one operation; the scatter and broadcast
        inside ``distribute_tensor`` become copies, because every rank has the whole record; FSDP1,
        which asks before it calls ``param_init_fn``, gets True.
        """
        frame = sys._getframe(1)
        caller = _torch.caller_of(frame)
        if caller == "trunc_normal":
            self._trunc_normal(frame.f_locals)
        elif caller == "mesh_scatter":
            mesh, scattered = frame.f_locals["mesh"], frame.f_locals["scatter_list"]
            with torch.no_grad():
                self.copy_(scattered[mesh.get_local_rank(frame.f_locals["mesh_dim"])])
        else:
            return caller == "mesh_broadcast" or _is_fsdp1_with_init(frame)
        return True

    def _trunc_normal(self, called: dict[str, Any]) -> None:
        if self._region.storage.deferred:
            args = (self, *(float(called[name]) for name in ("mean", "std", "a", "b")))
            kwargs = {"generator": called.get("generator")}
            operator = describe(trunc_normal)
            if self._history.escaped is not None:
                _through(trunc_normal, operator, args, kwargs)
            else:
                record(trunc_normal, operator, args, kwargs, writes=(self._region,))


DispatchingTensor.__name__ = DispatchingTensor.__qualname__ = "FakeTensor"  # in errors of others
FakeTensor.concrete = DispatchingTensor


def _is_fsdp1_with_init(frame: FrameType) -> bool:
    """Return whether ``frame`` is the generator in which FSDP1 asks, and has a param_init_fn."""
    asks = frame.f_back if frame.f_code.co_name == "<genexpr>" else None
    return (
        asks is not None
        and asks.f_back is not None
        and _torch.caller_of(asks) == "fsdp1_needs_values"
        and asks.f_back.f_locals.get("param_init_fn") is not None
    )


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func``: for real without fake arguments, else on shapes, recorded if deferred."""
    operator = describe(func)
    result = _HANDLERS[operator.kind](func, operator, args, kwargs)
    return _any(func, operator, args, kwargs) if result is NotImplemented else result


def _simple(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record ``func`` without asking its meta kernel, where no kernel would refuse the tensor."""
    fake = args[0]
    if (
        type(fake) is not DispatchingTensor
        or fake._history.escaped is not None
        or not fake._region.dtype.is_floating_point
        or 0 in fake._region.stride  # an expanded one may be refused
        or (len(args) > 1 and isinstance(args[1], torch.Tensor))
    ):
        return NotImplemented
    if fake._region.storage.deferred:
        record(func, operator, args, kwargs, (fake._region,))
    return fake


def _detach(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fake = args[0]
    if not isinstance(fake, FakeTensor):
        return NotImplemented
    alias = fake_from_region(fake._region, fake._history)
    if type(fake) is not DispatchingTensor:
        alias.__class__ = type(fake)
    return alias


def _new_empty(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], FakeTensor) or not _torch.is_copying():
        return NotImplemented
    return for_real(func, operator, args, kwargs)  # copies of real tensors are real


def _decompose(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


def _lift(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    session = sessions.current()
    if session is None or isinstance(args[0], FakeTensor):
        return NotImplemented
    if session.is_over_memory(args[0]):
        return args[0]
    return made.constant_fake(args[0], session.deferred)


def _any(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fakes = made.fakes_in(*args, kwargs)
    if any(fake._history.escaped is not None for fake in fakes):
        real = _through(func, operator, args, kwargs)
        if real is not NotImplemented:
            return real
    if not fakes:
        session, device = sessions.current(), kwargs.get("device") or torch.device("cpu")
        if session is None or not operator.is_factory or device.type == "meta":
            return for_real(func, operator, args, kwargs)
        made.check_device(device, session)
    return _general(func, operator, args, kwargs, fakes)


# By the kinds of operators. They return NotImplemented where `_any` must execute an operation.
_HANDLERS: dict[str, Handler] = {
    "simple": _simple,
    "pure": ahead,
    "number": ahead,
    "sized": made.factory,
    "composite": _decompose,
    "detach": _detach,
    "new_empty": _new_empty,
    "lift": _lift,
    "any": _any,
}


def _through(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` on arguments whose memory has escaped.

    Returns:
        ``NotImplemented`` if it only reads them, beside deferred ones, and must be recorded.
    """
    written = made.written_by(operator, args, kwargs)
    deferred = any(fake._history.escaped is None for fake in made.fakes_in((args, kwargs)))
    writes = [
        one for one in written if isinstance(one, FakeTensor) and one._history.escaped is not None
    ]
    if operator.changes_shape or (deferred and not writes):
        return NotImplemented
    aliases: dict[int, tuple[torch.Tensor, FakeTensor]] = {}

    def alias(fake: FakeTensor) -> torch.Tensor:
        escaped = fake._history.escaped
        if escaped is None:
            return fake
        real = fake._region.of(escaped)
        aliases[id(real)] = real, fake
        return real

    real_args, real_kwargs = map_tensors((args, kwargs), FakeTensor, alias)
    answer = dispatch(func, real_args, real_kwargs)
    for fake in writes:
        if fake._history.escaped is not None:
            torch.autograd.graph.increment_version(fake._history.escaped)
    return map_tensors(answer, torch.Tensor, lambda one: aliases.get(id(one), (one, one))[1])


def _general(
    func: Any,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor],
) -> Any:
    if operator.written and func in made.SETS and isinstance(args[0], FakeTensor):
        return made.set_memory(func, *args)
    _check_supported(func, operator, fakes)
    deferred = sessions.recording() is not None or any(
        fake._region.storage.deferred for fake in fakes
    )
    written = made.written_by(operator, args, kwargs)
    if (
        operator.needs_values
        or not all(isinstance(tensor, FakeTensor) for tensor in written)
        or _may_be_refused(operator, written, fakes)
    ):
        return by_value(func, args, kwargs, fakes, deferred)
    try:
        results = made.shapes_of(func, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not _is_only_shapeless(operator, written, fakes, error):
            return by_value(func, args, kwargs, fakes, deferred)
        results = None  # in place: the shapes are those of the arguments
    if operator.changes_shape:
        return made.reshape_in_place(args[0], results)
    if operator.is_view:
        return map_tensors(results, torch.Tensor, lambda result: made.view_of(fakes[0], result))
    created: list[Any] = []
    if operator.creates:
        device = made.device_of(func, args, kwargs)
        answer = map_tensors(
            results, torch.Tensor, lambda result: made.new_fake(result, device, deferred)
        )
        created = [item if item is None else item._region for item in flat(answer)]
    else:
        made.check_sizes(func, results, written)
        answer = made.as_returned(func, written)
    if deferred:
        writes = tuple(fake._region for fake in written)
        record(func, operator, args, kwargs, writes, tuple(created))
    return answer


def _may_be_refused(operator: Operator, written: list[FakeTensor], fakes: list[FakeTensor]) -> bool:
    """Return whether torch may refuse to write to one of ``written``, because several of its
    elements are one in memory, or some of them are elements of an argument. Meta kernels cannot
    tell, as they have no addresses.
    """
    regions = [fake._region for fake in fakes]
    for to in (fake._region for fake in written):
        if to.is_expanded or any(map(to.partly_overlaps, regions)):
            return True
        if not operator.slices and regions.count(to) > 1:
            return True
    return False


def _check_supported(func: Any, operator: Operator, fakes: list[FakeTensor]) -> None:
    if operator.name.startswith(("c10d::", "_c10d_functional::")):
        raise DeferredError(
            f"{func} would send the values of a deferred tensor, which it does not have yet: "
            f"{fakes[0]!r}. Materialize the module first; every rank gets the same values if all "
            "recorded with the same seed."
        )
    if operator.name.startswith("aten::quantize"):
        raise UnsupportedError(
            f"{func}: quantized tensors cannot be deferred. Make them outside deferred_init."
        )


def _is_only_shapeless(
    operator: Operator, written: list[Any], fakes: list[FakeTensor], error: Exception
) -> bool:
    """Return whether ``func`` can be recorded although its meta kernel is missing or refuses.

    Some meta kernels refuse what the real ones accept. The operation is then run for real, and if
    that fails, the error is the eager one. This excludes views, which must stay views.
    """
    if isinstance(error, NotImplementedError):
        return bool(written) and not operator.creates
    has_values = all(fake._region.storage.deferred for fake in fakes)
    if operator.is_view or operator.changes_shape or not has_values:
        raise error
    return False
