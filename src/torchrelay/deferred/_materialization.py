"""Materialisation: run the recorded operations and turn fake tensors into real ones."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch

from torchrelay import _telemetry, _torch
from torchrelay._boxes import Box
from torchrelay._progress import Progress, tracking
from torchrelay.deferred._graph import Storage
from torchrelay.deferred._initialization import deferred_init, is_deferred
from torchrelay.deferred._modules import (
    OF_EVERY_MODULE,
    PLAIN,
    children_first,
    escape_count,
    fakes_inside,
    find_escapes,
    own_tensors,
    take_escapes,
)
from torchrelay.deferred._parts import part_of, whole
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._reversal import remember
from torchrelay.deferred._shards import (
    Shard,
    check_shard,
    distributed,
    local_box,
    sliced,
)
from torchrelay.deferred._tensor import FakeTensor, become, replacement
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError

__all__ = ["init_without_escapes", "materialize_module", "materialize_tensor"]

_log = logging.getLogger("torchrelay.deferred")


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the values of ``tensor`` and return it, the same object. Real tensors are unchanged.

    Raises:
        ArgumentError: ``tensor`` is not a tensor.
        DeferredError: ``tensor`` is fake, or on the meta device, but not from
            :func:`deferred_init`; or a real tensor that its initialisation read has changed since.
        UnavailableError: it was recorded for a device that this machine lacks.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"materialize_tensor() takes a tensor, not {type(tensor).__name__}.")
    if isinstance(tensor, FakeTensor):
        _Materialization(Replay()).tensor("", tensor)
    elif lacking := _without_values({"the tensor": tensor}):
        _refuse(lacking)
    return tensor


def _without_values(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that have no values, and that deferred_init has not made."""
    return [
        name
        for name, tensor in tensors.items()
        if any(
            not isinstance(one, FakeTensor) and (one.device.type == "meta" or _torch.is_fake(one))
            for one in _torch.inner_tensors(tensor)
        )
    ]


def _refuse(names: list[str]) -> NoReturn:
    raise DeferredError(
        f"{_listed(names)}: on the meta device, or a fake tensor of torch, so nothing is known of "
        "its values. Build the module with deferred_init(); or give it memory by to_empty() and "
        "load a checkpoint into it."
    )


def _check_deferred(fake: FakeTensor) -> None:
    if not fake._region.storage.deferred:
        raise DeferredError(
            "This fake tensor was made by fake_mode(), so nothing is known of its values: "
            f"{fake!r}. Only tensors made inside deferred_init() can be materialized."
        )


def materialize_module(
    module: torch.nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    uninitialized: Collection[str] = (),
    leave_deferred: Collection[str] = (),
    progress: Progress = False,
) -> None:
    """Compute the deferred tensors of ``module``, children first, one tensor at a time.

    Parameters stay the same objects, unless a DTensor replaces them. Deferred tensors that are
    plain attributes of a module, or in a list, tuple or dict there, are materialised whole, unless
    a module registers them. No values are sent between ranks.

    Args:
        buffers_only: leave parameters deferred.
        check_fn: called with each submodule; if it returns False, the submodule's own tensors are
            left unchanged.
        device: the device of the values, also for tensors recorded for an absent device.
        dtype: floating-point tensors are converted to it after their values are computed.
        shard: the part that this process keeps. Either a function of the qualified name and the
            fake tensor that returns a tuple of slices, or None for all of it; or a pair
            ``(device_mesh, placements)``, of which the parameter becomes a DTensor and only the
            local part is computed. The placements may be a function of name and tensor, too.
        uninitialized: qualified names of tensors that get memory but no values, because the caller
            will fill them. Values that depend on them are computed from the recorded ones.
        leave_deferred: qualified names of tensors that stay deferred; of a tied tensor, all names.
        progress: True for a progress bar, or a function (bytes done, bytes in all).

    Raises:
        ArgumentError: an argument has the wrong type, or slices do not fit.
        DeferredError: as for :func:`materialize_tensor`.
        UnavailableError: as for :func:`materialize_tensor`.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"materialize_module() takes a module, not {type(module).__name__}.")
    check_shard(shard)
    places = list(children_first(module))
    _check_values(module, places)
    registered = {id(tensor) for _, one in places for tensor in own_tensors(one).values()}
    replay = Replay(pretend=device is not None)
    materialization = _Materialization(replay, device, dtype, shard, leave_deferred)
    materialization.leave_uninitialized(places, uninitialized)
    sizes = _deferred_bytes(places) if progress else {}
    with (
        _telemetry.event("deferred", "materialize_module", type(module).__name__),
        tracking(progress, sum(sizes.values()), "materializing") as advance,
    ):
        for prefix, submodule in places:
            if check_fn is None or check_fn(submodule):
                materialization.run(submodule, prefix, registered, buffers_only)
            if progress:
                advance(sizes[prefix])
    if check_fn is None and not buffers_only:
        _materialize_escaped()


def _check_values(module: torch.nn.Module, places: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Refuse a module that deferred_init has not made; log what others have made of it."""
    lacking = _without_values(
        {prefix + name: one for prefix, part in places for name, one in own_tensors(part).items()}
    )
    if lacking and not is_deferred(module):
        _refuse(lacking)
    if lacking:
        _log.warning(
            "materialize_module: on the meta device, where deferred_init does not make tensors: "
            "%s; they stay as they are",
            _listed(lacking),
        )


def _deferred_bytes(places: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, int]:
    """Return the bytes of each submodule's own deferred tensors, by prefix; of tied ones once."""
    seen: set[int] = set()
    sizes = {}
    for prefix, module in places:
        fakes = {id(t): t for t in own_tensors(module).values() if isinstance(t, FakeTensor)}
        new = [fake for key, fake in fakes.items() if key not in seen]
        sizes[prefix] = sum(math.prod(fake.shape) * fake.dtype.itemsize for fake in new)
        seen |= fakes.keys()
    return sizes


def init_without_escapes(fn: Callable[[], Any]) -> tuple[Any, int]:
    """Call ``fn()`` as :func:`.deferred_init` does; materialise at once what it keeps outside of
    its result, in a global, a cache, a closure or any other object, even if it raises.

    Returns:
        its result, and the number of these tensors.
    """
    mark, result, escaped = escape_count(), None, 0
    try:
        result = deferred_init(fn)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # which keep what it has made so far
        raise
    finally:
        for fake in take_escapes(mark):
            materialize_tensor(fake)
            escaped += 1
    return result, escaped


def _materialize_escaped() -> None:
    """Materialise caches filled by deferred_init, so that later construction is not fake."""
    cached, elsewhere = find_escapes()
    for _, fake in cached:
        materialize_tensor(fake)
    if cached:
        _log.warning(
            "materialize_module: %d tensors that deferred_init has left outside the module are "
            "materialized, too: %s",
            len(cached),
            _listed([f"{where} {tuple(fake.shape)}" for where, fake in cached]),
        )
    if elsewhere:
        _log.warning(
            "materialize_module: %d tensors that deferred_init has made are not in the module and "
            "stay deferred; materialize_tensor() gives them their values. Their shapes: %s",
            len(elsewhere),
            _listed([str(tuple(fake.shape)) for fake in elsewhere]),
        )


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:_MOST_LISTED]) + (", ..." if len(texts) > _MOST_LISTED else "")


_MOST_LISTED = 10


class _Materialization:
    """State of one call of :func:`materialize_module`."""

    def __init__(
        self,
        replay: Replay,
        device: Any = None,
        dtype: torch.dtype | None = None,
        shard: Any = None,
        left: Collection[str] = (),
    ) -> None:
        self._replay = replay
        self._left = frozenset(left)
        self._device = device
        self._dtype = dtype
        self._shard = shard
        self._replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._blank: set[Storage] = set()  # get memory only
        self._memory: dict[Storage, torch.UntypedStorage] = {}

    def leave_uninitialized(
        self, places: Iterable[tuple[str, torch.nn.Module]], names: Collection[str]
    ) -> None:
        """Record which values are not wanted.

        A storage counts only if this holds for every tensor over it.
        """
        if not names:
            return
        wanted: set[Storage] = set()
        named: dict[int, Storage] = {}
        for prefix, module in places:
            for name, tensor in own_tensors(module).items():
                for fake in _inner_fakes(tensor):
                    if prefix + name in names:
                        named[id(fake)] = fake._region.storage
                    elif id(fake) not in named:  # not another name of a tied one
                        wanted.add(fake._region.storage)
        self._blank = set(named.values()) - wanted

    def run(
        self, module: torch.nn.Module, prefix: str, registered: set[int], buffers_only: bool
    ) -> None:
        for fake in () if buffers_only else _loose_fakes(module, registered):
            self._give(fake, is_loose=True)
        for registry in (
            (module._buffers,) if buffers_only else (module._parameters, module._buffers)
        ):
            for name, tensor in list(registry.items()):
                if tensor is not None and prefix + name not in self._left:
                    registry[name] = self.tensor(prefix + name, tensor)  # type: ignore[assignment]

    def tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Materialise one tensor; return it, or the DTensor that replaces it."""
        if id(tensor) in self._replaced:
            return self._replaced[id(tensor)][1]
        if not isinstance(tensor, FakeTensor):
            self._materialize_inner(name, tensor)
            return tensor
        _check_deferred(tensor)
        region, history = tensor._region, tensor._history
        is_first = history.is_unshared(self._replay.materialization)
        box = local_box(self._shard, name, tensor)
        new = self._give(tensor) if box is None else self._part(name, tensor, box)
        # The recorded values of what stays uninitialized are not those that it will have.
        if is_first and region.storage not in self._blank:
            remember(new, region, history)
        return new

    def _materialize_inner(self, name: str, wrapper: torch.Tensor) -> None:
        """Materialise what a subclass is made of: a DTensor's local tensor, a quantized tensor's
        parts.
        """
        fakes = _inner_fakes(wrapper)
        if fakes:
            self._check_wrapper(name, wrapper)
        for fake in fakes:
            _check_deferred(fake)
            self._give(fake)

    def _check_wrapper(self, name: str, wrapper: torch.Tensor) -> None:
        refused = wrapper.is_floating_point() and self._dtype not in (None, wrapper.dtype)
        if not hasattr(wrapper, "_local_tensor"):
            other_device = self._device is not None and torch.device(self._device) != wrapper.device
            refused = refused or self._shard is not None or other_device
        if refused:
            raise UnsupportedError(
                f"{name} is a {type(wrapper).__name__}, which materialize_module() gives its "
                "values, but cannot cut or convert with shard, dtype or device. Materialize the "
                f"module first, then do that; or make it a {type(wrapper).__name__} afterwards."
            )

    def _part(self, name: str, fake: FakeTensor, box: Box) -> torch.Tensor:
        with _torch.plain_torch():
            local = self._convert(self._part_values(fake, box))
        value = distributed(self._shard, name, fake, local)
        if value is local:
            return become(fake, local)
        new = replacement(fake, value)
        self._replaced[id(fake)] = fake, new
        return new

    def _give(self, fake: FakeTensor, is_loose: bool = False) -> torch.Tensor:
        history, region = fake._history, fake._region
        storage = region.storage
        # Beside parts, which have memory of their own, a loose one is filled by nobody else.
        is_blank = storage in self._blank and not (is_loose and self._shard is not None)
        with _torch.plain_torch():
            if is_blank:
                if storage not in self._memory:
                    self._memory[storage] = self._replay.empty(storage)
                memory = region.over(self._memory[storage])
            else:
                memory = whole(region, history, self._replay)
            real = self._convert(memory)
        become(fake, real)
        if real is memory and not is_blank:
            history.hand_out(fake, self._replay.materialization)
        return fake

    def _part_values(self, fake: FakeTensor, box: Box) -> torch.Tensor:
        region = sliced(fake, box)
        if region.storage not in self._blank:
            return part_of(region, self._replay)
        return torch.empty(
            region.size, dtype=region.dtype, device=self._replay.place(region.storage.device)
        )

    def _convert(self, real: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if real.is_floating_point() else None
        return real.to(device=self._device, dtype=dtype)


def _inner_fakes(tensor: torch.Tensor) -> list[FakeTensor]:
    return [one for one in _torch.inner_tensors(tensor) if isinstance(one, FakeTensor)]


def _loose_fakes(module: torch.nn.Module, registered: set[int]) -> list[FakeTensor]:
    """Return deferred tensors that are plain attributes of ``module``, except those whose ids are
    in ``registered``.

    Results come before their arguments.
    """
    found = {
        id(fake): fake
        for name, value in module.__dict__.items()
        if name not in OF_EVERY_MODULE and type(value) not in PLAIN
        for fake in fakes_inside(value, 2)
        if fake._region.storage.deferred and id(fake) not in registered
    }
    return sorted(found.values(), key=lambda fake: fake.is_leaf)
