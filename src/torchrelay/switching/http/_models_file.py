"""`models.toml`, the configuration of `torchrelay serve`, or a folder of such files."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from torchrelay.config import Switching, load
from torchrelay.errors import ConfigError, TorchRelayError
from torchrelay.switching.generate._models import GenerateOptions
from torchrelay.switching.http._schema import sentence
from torchrelay.switching.models._encoders import is_encoder
from torchrelay.switching.models._inputs import PROMPT, TEXTS, InputSpec
from torchrelay.switching.models._store import ModelStore, check_name
from torchrelay.switching.models._tensors import dtype_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ModelEntry", "ModelsFile"]

T = TypeVar("T")

_log = logging.getLogger("torchrelay.switching")
_OF_GENERATE = ("max_context", "kv_bytes", "weight")  # keys, as of GenerateOptions
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    datatype: str
    shape: list[int]
    example: list[int] | None = None


class _Model(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A table `[models.NAME]`."""

    kind: Literal["tensors", "generate", "embed"] = "tensors"
    factory: str = ""
    inputs: list[_Input] = []
    kwargs: dict[str, Any] = {}
    weights: str = ""
    weights_prefix: str = ""
    seed: int = 0
    priority: int = 0
    pinned: bool = False
    load: bool | Literal["request"] = True
    keep_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_batch_size: _Count = 0
    max_delay_us: _Count = 0
    max_context: _Count = 0
    kv_bytes: _Count = 0
    weight: float = 1.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    server: dict[str, Any] = {}
    models: dict[str, Any] = {}


@dataclass(frozen=True)
class ModelEntry:
    """One table `[models.NAME]`."""

    name: str
    arguments: dict[str, Any]  # of ModelStore.add
    priority: int = 0
    load: bool | str = True  # at the start; "request": at the first request
    keep_s: float = 0.0  # unload it after so long without a request; 0: never
    pinned: bool = False

    def add_to(self, store: ModelStore) -> None:
        """Build the model into `store`, in place of an older one."""
        store.add(self.name, **self.arguments, replace=True)


@dataclass(frozen=True)
class ModelsFile:
    """A parsed file, or a folder of such files. Paths and imports in a file are relative to its
    folder. Variables ``TORCHRELAY_SWITCHING_*`` override its table ``[server]``.
    """

    folder: Path
    server: Switching
    models: dict[str, ModelEntry]
    read_again: Callable[[], dict[str, ModelEntry]]  # returns the models that it has now
    folders: tuple[Path, ...] = field(default=())  # of all files, where their imports are found

    @classmethod
    def read(cls, path: Path) -> ModelsFile:
        """Read and check `path`: a file, or a folder, whose files ``*.toml`` and ``*/*.toml`` are
        read as one.

        Raises:
            ConfigError: it cannot be read, or something in it is unknown or wrong.
        """
        files = sorted([*path.glob("*.toml"), *path.glob("*/*.toml")]) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path} has no files *.toml or */*.toml, which describe models")
        models: dict[str, ModelEntry] = {}
        origins: dict[str, Path] = {}
        server: tuple[Path, dict[str, Any]] | None = None
        for file in files:
            table = _parsed(file)
            if table.server and server is not None:
                raise ConfigError(f"{file} and {server[0]} both have a table [server]; keep one")
            if table.server:
                server = file, table.server
            for name, model in table.models.items():
                if name in models:
                    raise ConfigError(f"{file} and {origins[name]} both have a model {name!r}")
                models[name], origins[name] = _entry(file, name, model), file
        if not models:
            raise ConfigError(f"{path} has no models: add a table [models.NAME]")
        origin, given = server or (path, {})
        settings = load(Switching, file=given, origin=f"{origin}: [server]")
        folders = tuple(dict.fromkeys(file.resolve().parent for file in files))
        return cls(folders[0], settings, models, lambda: cls.read(path).models, folders)

    @classmethod
    def of_snapshots(cls, folder: Path) -> ModelsFile:
        """Return a file that serves each Hugging Face snapshot that is a folder in `folder`, by the
        folder's name, from its first request on. A name that is not valid is logged once.

        Raises:
            ConfigError: there is none, or none has a valid name.
        """
        folder = folder.absolute()
        logged: set[str] = set()

        def read() -> dict[str, ModelEntry]:
            entries: dict[str, ModelEntry] = {}
            wrong = f"{folder} has no snapshots: folders with a config.json"
            for config in sorted(folder.glob("*/config.json")):
                try:
                    entries[config.parent.name] = _snapshot(config.parent)
                except ConfigError as error:
                    wrong = str(error)
                    if wrong not in logged:
                        _log.warning("not served: %s", wrong)
                    logged.add(wrong)
            if not entries:
                raise ConfigError(wrong)
            return entries

        return cls(folder, load(Switching), read(), read)


def _snapshot(folder: Path) -> ModelEntry:
    with _naming(f"{folder}:", "; rename the folder"):
        check_name(folder.name)
    kind: dict[str, Any] = {"generate": GenerateOptions(), "inputs": PROMPT}
    with contextlib.suppress(TorchRelayError):  # which its first request raises
        kind = {"embed": True, "inputs": TEXTS} if is_encoder(folder) else kind
    return ModelEntry(folder.name, {"weights": folder, **kind}, load="request")


def _parsed(file: Path) -> _File:
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return _converted(f"{file}:", table, _File)


def _converted(where: str, table: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} {sentence(error)}") from error


def _entry(file: Path, name: str, table: object) -> ModelEntry:
    with _naming(f"{file}: [models]:"):
        check_name(name)
    where, folder = f"{file}: [models.{name}]", file.resolve().parent
    model = _converted(where, table, _Model)
    own = ("kind", "inputs", "priority", "pinned", "load", "keep_s")
    given = {key: value for key, value in msgspec.to_builtins(model).items() if key not in own}
    options = {key: given.pop(key) for key in _OF_GENERATE if key in given}
    module, colon, function = model.factory.rpartition(":")
    if module.endswith(".py"):
        given["factory"] = f"{folder / module}{colon}{function}"
    if model.weights:
        given["weights"] = folder / model.weights
    if model.kind == "generate":
        if model.inputs or not (model.factory or model.weights):
            raise ConfigError(
                f"{where}: a model that generates needs weights, the folder of a snapshot, or a "
                "factory, and no inputs"
            )
        if model.max_batch_size:
            options["max_batch_size"] = given.pop("max_batch_size")
        with _naming(f"{where}:"):
            given["generate"], given["inputs"] = GenerateOptions(**options), PROMPT
    elif options:
        raise ConfigError(f'{where} {min(options)}: it is of models of kind = "generate"')
    elif model.kind == "embed":
        if model.inputs or model.factory or not model.weights:
            raise ConfigError(
                f"{where}: an encoder needs weights, the folder of a snapshot; it has no factory "
                "and no inputs"
            )
        given["embed"], given["inputs"] = True, TEXTS
    elif not model.factory:
        raise ConfigError(f"{where} factory: name the function that builds the model")
    else:
        given["inputs"] = _inputs(f"{where} inputs", model.inputs)
    return ModelEntry(name, given, model.priority, model.load, model.keep_s, model.pinned)


def _inputs(where: str, given: list[_Input]) -> dict[str, InputSpec]:
    inputs: dict[str, InputSpec] = {}
    for one in given:
        if not one.name:
            raise ConfigError(f"{where}: an input has an empty name")
        if one.name in inputs:
            raise ConfigError(f"{where}: {one.name!r} appears twice")
        example = None if one.example is None else tuple(one.example)
        with _naming(f"{where}:", '; write {name = "x", datatype = "FP32", shape = [-1, 64]}'):
            dtype, shape = dtype_of(one.datatype), tuple(one.shape)
            inputs[one.name] = InputSpec(one.name, dtype, shape, example)
    if not inputs:
        raise ConfigError(f"{where}: name at least one")
    return inputs


@contextlib.contextmanager
def _naming(where: str, advice: str = "") -> Iterator[None]:
    """Raise errors of the block as those of the file."""
    try:
        yield
    except TorchRelayError as error:
        raise ConfigError(f"{where} {error}{advice}") from error
