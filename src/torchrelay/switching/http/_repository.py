"""The models of the models file: loaded when asked for, or at their first request, and unloaded
when they have been idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torchrelay.errors import ConfigError, NotFoundError, OperationTimeoutError, TorchRelayError
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.http._models_file import ModelEntry
from torchrelay.switching.models._inputs import InputSpec
from torchrelay.switching.models._store import ModelStore
from torchrelay.switching.worker._profile import Output

__all__ = ["Description", "Repository"]

_log = logging.getLogger("torchrelay.switching")
_LOOK_AGAIN_S = 1.0  # between two looks for models that are not known


class Description(NamedTuple):
    """What clients may know of a model."""

    version: str  # "" before it was loaded
    inputs: tuple[InputSpec, ...]
    outputs: tuple[Output, ...]  # empty before it was loaded
    max_batch_size: int


class Repository:
    """The models of a file over one switcher and its store. Used in the switcher's event loop."""

    def __init__(
        self,
        switcher: Switcher,
        store: ModelStore,
        entries: dict[str, ModelEntry],
        read_again: Callable[[], dict[str, ModelEntry]] | None = None,
    ) -> None:
        """Serve `entries`, and those of `read_again`, which reads what the file holds now."""
        self.entries = entries
        self._read_again = read_again or (lambda: entries)
        self._looked_s = -_LOOK_AGAIN_S
        self._logged = ""  # why the file could not be read
        self._switcher = switcher
        self._store = store
        # Loads of one model run one after the other.
        self._loaders: dict[str, ThreadPoolExecutor] = {}
        self._loading: dict[str, Future[None]] = {}
        self._retired: set[str] = set()  # models that were unloaded because they were idle
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}

    def is_on_request(self, name: str) -> bool:
        """Return whether a request to the model, which is not loaded, loads it."""
        if name not in self.entries:
            self._look_again()
        entry = self.entries.get(name)
        return entry is not None and (entry.load == "request" or name in self._retired)

    def is_ready(self, name: str) -> bool:
        """Return whether a request to the model can be answered."""
        if self._switcher.stored(name) is None:
            return self.is_on_request(name)
        return self._switcher.is_ready(name)

    def names(self) -> list[str]:
        """Return the names of all models: of the file, and of the store."""
        self._look_again()
        return sorted({*self.entries, *self._store.names(), *self._switcher.models()})

    def describe(self, name: str, version: str = "") -> Description:
        """Return what is known of the model that answers; else of the store's, or the file's.

        Raises:
            NotFoundError: there is no such model, or its version is not `version`.
        """
        model = self._switcher.stored(name)
        if model is None and self.is_on_request(name) and name not in self._store.names():
            entry = self.entries[name]
            size = entry.arguments.get("max_batch_size", 0)
            found = Description("", tuple(entry.arguments["inputs"].values()), (), size)
        else:
            model = model or self._store.get(name)
            outputs = self._switcher.outputs(name)
            known = model.inputs, outputs, model.max_batch_size
            found = Description(str(model.version), *known)
        if found.version and version not in ("", found.version):
            raise NotFoundError(f"model {name!r} has version {found.version}, not {version}")
        return found

    async def prepare(self, name: str, deadline_s: float | None) -> None:
        """Load the model if it is one that its requests load, and note that it is used.

        Raises:
            OperationTimeoutError: it was not loaded in time; it will be.
        """
        loading = self._loading.get(name)
        is_loaded = loading is None and self._switcher.stored(name) is not None
        if is_loaded or not self.is_on_request(name):
            return
        loading = loading or self.load(name)
        waiting = asyncio.shield(asyncio.wrap_future(loading))
        try:
            await asyncio.wait_for(waiting, deadline_s)
        except asyncio.TimeoutError as error:
            raise OperationTimeoutError(
                f"model {name!r} was being loaded for its first request, which missed its "
                f"deadline after {deadline_s:g} s"
            ) from error

    def load(self, name: str) -> Future[None]:
        """Start to load or reload a model as the file describes it now.

        Raises:
            ConfigError: the file cannot be read.
            NotFoundError: the file has no such model.
        """
        entry = self.entries[name] = _entry(self._read_again(), name)

        def run() -> None:
            start = time.monotonic()
            _log.info("model %r: building it", name)
            entry.add_to(self._store)
            self._switcher.load(name, priority=entry.priority, pinned=entry.pinned)
            _log.info("model %r: ready after %.3g s", name, time.monotonic() - start)

        if name not in self._loaders:
            self._loaders[name] = ThreadPoolExecutor(1, f"torchrelay-load-{name}")
        future = self._loading[name] = self._loaders[name].submit(run)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda one: loop.call_soon_threadsafe(self._loaded, name, one))
        return future

    def _loaded(self, name: str, future: Future[None]) -> None:
        if self._loading.get(name) is future:
            del self._loading[name]
        self._used[name] = time.monotonic()
        if not future.cancelled() and future.exception() is None:
            self._retired.discard(name)

    def unload(self, name: str) -> None:
        """Unload a model of the file.

        Raises:
            NotFoundError: the file has no such model, or it is not loaded.
        """
        # Not after a load that is in progress: that may hang, and unloading ends it.
        _entry(self.entries, name)
        self._retired.discard(name)
        self._switcher.unload(name)
        self._store.remove(name)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Note that a request to the model runs."""
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1
            self._used[name] = time.monotonic()

    def unload_idle(self) -> None:
        """Unload models that were not used for longer than their `keep_s`."""
        now = time.monotonic()
        for name, entry in self.entries.items():
            is_idle = entry.keep_s and not self._running[name] and name not in self._loading
            if is_idle and self._switcher.is_ready(name):
                idle_s = now - self._used.setdefault(name, now)
                if idle_s > entry.keep_s:
                    _log.info("model %r: unloaded after %.3g s without a request", name, idle_s)
                    try:
                        self.unload(name)
                    except TorchRelayError:  # another thread has
                        continue
                    self._retired.add(name)

    def _look_again(self) -> None:
        """Add the models that have come into the file, and drop those that have left it and are
        not loaded, if it was not just looked at.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = now
        try:
            found = self._read_again()
        except ConfigError as error:
            if self._logged != str(error):
                self._logged = str(error)
                _log.warning("no model was added: %s", error)
            return
        self._logged = ""
        used = {*found, *self._loading, *self._store.names()}
        known = {name: entry for name, entry in self.entries.items() if name in used}
        self.entries = {**found, **known}


def _entry(entries: Mapping[str, ModelEntry], name: str) -> ModelEntry:
    if name not in entries:
        names = ", ".join(sorted(entries)) or "none"
        raise NotFoundError(f"the models file has no model {name!r}; it has {names}")
    return entries[name]
