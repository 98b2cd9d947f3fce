"""`models.toml`, the configuration of `torchrelay serve`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.config import Switching, load
from torchrelay.errors import ConfigError, TorchRelayError
from torchrelay.switching._store import InputLike, InputSpec, ModelStore
from torchrelay.switching._tensors import dtype_of

__all__ = ["ModelEntry", "ModelsFile"]

_KINDS: dict[str, type] = {
    "factory": str,
    "inputs": list,
    "kwargs": dict,
    "weights": str,
    "weights_prefix": str,
    "seed": int,
    "priority": int,
    "load": bool,
    "max_batch_size": int,
    "max_delay_us": int,
}


@dataclass(frozen=True)
class ModelEntry:
    """One table `[models.NAME]`."""

    name: str
    arguments: dict[str, Any]  # of ModelStore.add
    priority: int = 0
    load: bool = True

    def add_to(self, store: ModelStore) -> None:
        """Build the model into `store`."""
        store.add(self.name, **self.arguments)


@dataclass(frozen=True)
class ModelsFile:
    """A parsed file. Paths and imports in it are relative to its folder. Variables
    ``TORCHRELAY_SWITCHING_*`` override its table ``[server]``.
    """

    folder: Path
    server: Switching
    models: dict[str, ModelEntry]

    @classmethod
    def read(cls, path: Path) -> ModelsFile:
        """Read and check `path`.

        Raises:
            ConfigError: it cannot be read, or something in it is unknown or wrong.
        """
        try:
            table = _parse(path.read_bytes().decode())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        _check_keys(path, "the file", table, {"server", "models"})
        folder = path.resolve().parent
        models = {
            name: _model(path, folder, name, entry)
            for name, entry in _table(path, table, "models").items()
        }
        if not models:
            raise ConfigError(f"{path} has no models: add a table [models.NAME]")
        server = load(Switching, file=_table(path, table, "server"), origin=f"{path}: [server]")
        return cls(folder, server, models)


def _parse(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from error


def _table(path: Path, parent: dict[str, Any], key: str) -> dict[str, Any]:
    table = parent.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {key} must be a table")
    return table


def _check_keys(path: Path, where: str, table: dict[str, Any], known: set[str]) -> None:
    unknown = set(table) - known
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ConfigError(
            f"{path}: {where} has the unknown key {names}; known are {', '.join(sorted(known))}"
        )


def _model(path: Path, folder: Path, name: str, table: Any) -> ModelEntry:
    where = f"[models.{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {where} must be a table")
    _check_keys(path, where, table, set(_KINDS))
    if not isinstance(table.get("factory"), str) or not isinstance(table.get("inputs"), list):
        raise ConfigError(f"{path}: {where} needs factory, a string, and inputs, a list")
    for key, value in table.items():
        if type(value) is not _KINDS[key]:
            kind = _KINDS[key].__name__
            raise ConfigError(f"{path}: {where} {key} = {value!r}: must be a {kind}")
    given = dict(table)
    own = {key: given.pop(key) for key in ("priority", "load") if key in given}
    module, colon, function = given["factory"].rpartition(":")
    if module.endswith(".py"):
        given["factory"] = f"{folder / module}{colon}{function}"
    if "weights" in given:
        given["weights"] = folder / given["weights"]
    given["inputs"] = dict(_input(path, where, one) for one in given["inputs"])
    return ModelEntry(name, given, **own)


def _input(path: Path, where: str, entry: Any) -> tuple[str, InputLike]:
    if isinstance(entry, dict):
        _check_keys(path, f"{where} inputs", entry, {"name", "datatype", "shape", "example"})
    try:
        name, dtype = str(entry["name"]), dtype_of(entry["datatype"])
        shape = tuple(entry["shape"])
        example = tuple(entry["example"]) if "example" in entry else None
        InputSpec(name, dtype, shape, example)  # checks them
        return name, (dtype, shape) if example is None else (dtype, shape, example)
    except (KeyError, TypeError, ValueError, TorchRelayError) as error:
        raise ConfigError(
            f"{path}: {where} inputs: {error}; write "
            '{name = "x", datatype = "FP32", shape = [-1, 64]}'
        ) from error
