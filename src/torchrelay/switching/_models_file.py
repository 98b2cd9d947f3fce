"""`models.toml`, the configuration of `torchrelay serve`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.config import Switching, load
from torchrelay.errors import ConfigError, TorchRelayError
from torchrelay.switching._store import InputSpec, ModelStore
from torchrelay.switching._tensors import dtype_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ModelEntry", "ModelsFile"]

_FILE = {"server": dict, "models": dict}
_MODEL = {
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
_INPUT = {"name": str, "datatype": str, "shape": list, "example": list}
_WORDS = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True)
class ModelEntry:
    """One table `[models.NAME]`."""

    name: str
    arguments: dict[str, Any]  # of ModelStore.add
    priority: int = 0
    load: bool = True

    def add_to(self, store: ModelStore) -> None:
        """Build the model into `store`, in place of an older one."""
        store.add(self.name, **self.arguments, replace=True)


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
            table = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        _check(f"{path}: the file", table, _FILE)
        folder = path.resolve().parent
        models = {
            name: _model(f"{path}: [models.{name}]", folder, name, entry)
            for name, entry in table.get("models", {}).items()
        }
        if not models:
            raise ConfigError(f"{path} has no models: add a table [models.NAME]")
        server = load(Switching, file=table.get("server"), origin=f"{path}: [server]")
        return cls(folder, server, models)


def _check(where: str, table: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return `table`, whose keys are among those of `kinds`, and its values of these types."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table")
    for key, value in table.items():
        if key not in kinds:
            known = ", ".join(sorted(kinds))
            raise ConfigError(f"{where} has the unknown key {key}; known are {known}")
        if type(value) is not kinds[key]:
            raise ConfigError(f"{where} {key} = {value!r}: must be {_WORDS[kinds[key]]}")
    return table


def _model(where: str, folder: Path, name: str, table: object) -> ModelEntry:
    given = dict(_check(where, table, _MODEL))
    if not given.keys() >= {"factory", "inputs"}:
        raise ConfigError(f"{where} needs factory, a string, and inputs, a list")
    own = {key: given.pop(key) for key in ("priority", "load") if key in given}
    module, colon, function = given["factory"].rpartition(":")
    if module.endswith(".py"):
        given["factory"] = f"{folder / module}{colon}{function}"
    if "weights" in given:
        given["weights"] = folder / given["weights"]
    specs = [_input(f"{where} inputs", one) for one in given["inputs"]]
    given["inputs"] = {spec.name: spec for spec in specs}
    return ModelEntry(name, given, **own)


def _input(where: str, entry: object) -> InputSpec:
    given = _check(where, entry, _INPUT)
    try:
        example = tuple(given["example"]) if "example" in given else None
        return InputSpec(given["name"], dtype_of(given["datatype"]), tuple(given["shape"]), example)
    except (KeyError, TorchRelayError) as error:
        raise ConfigError(
            f'{where}: {error}; write {{name = "x", datatype = "FP32", shape = [-1, 64]}}'
        ) from error
