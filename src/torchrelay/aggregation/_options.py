"""Where settings come from: ``Options``, else ``TORCHRELAY_AGGREGATION_*``, else a
``switchml.cfg``.

The file is the one SwitchML's client library reads (INI). With none, one host needs no
configuration.
"""

from __future__ import annotations

import configparser
import dataclasses
import os
import socket
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchrelay.config import Aggregation, check_value, load, parse_value, variable
from torchrelay.errors import ConfigError

__all__ = ["Options", "configuration_files", "resolve"]

_FIELDS = {field.name: field for field in dataclasses.fields(Aggregation)}  # type: ignore[arg-type]

# Sections and keys of the original's file, and the setting each one is. Those with a type instead
# are
# checked, and mean nothing here: torch knows the ranks, and workers join the switch itself.
_GENERAL = {
    "rank": int,
    "num_workers": int,
    "num_worker_threads": "num_worker_threads",
    "max_outstanding_packets": "max_outstanding_packets",
    "packet_numel": "packet_numel",
    "backend": ("shm", "dummy", "dpdk", "rdma"),
    "scheduler": ("fifo",),
    "prepostprocessor": ("cpu_exponent_quantizer", "bypass"),
    "instant_job_completion": bool,
    "controller_ip": str,
    "controller_port": int,
    "timeout": "packet_timeout_ms",
    "timeout_threshold": "timeout_threshold",
    "timeout_threshold_increment": "timeout_threshold_increment",
    "switch": "switch",  # ours
    "exact": "exact",  # ours
}
_DUMMY = {"bandwidth": "dummy_bandwidth", "process_packets": "dummy_process_packets"}
_REPLACED = ("dpdk", "rdma")
_SECTIONS = ("general", "backend.dummy", *(f"backend.{name}" for name in _REPLACED))


class Options:
    """Settings of one group, for ``init_process_group`` and ``new_group(pg_options=...)``.

    Takes the fields of :class:`torchrelay.config.Aggregation` as keywords:
    ``Options(plane="dummy")``.

    Raises:
        ConfigError: there is no such setting, or its value is not allowed.
    """

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            if name not in _FIELDS:
                raise ConfigError(
                    f"Options({name}=...): no such setting; there are {', '.join(_FIELDS)}"
                )
            kind = type(_FIELDS[name].default)
            if not isinstance(value, (int, float) if kind is float else kind):
                raise ConfigError(
                    f"Options({name}={value!r}): the value must be of type {kind.__name__}"
                )
            check_value(value, _FIELDS[name], f"Options({name}=...)")
        self.settings = settings

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def configuration_files() -> tuple[Path, ...]:
    """Where a file is looked for; the first that exists is read."""
    return (
        Path("switchml.cfg"),
        Path(f"switchml-{socket.gethostname()}.cfg"),
        Path("/etc/switchml.cfg"),
    )


def resolve(
    options: Options | None,
    environ: Mapping[str, str] | None = None,
    files: Iterable[Path] | None = None,
) -> Aggregation:
    """The settings of a group.

    Raises:
        ConfigError: a key or variable is unknown or has a bad value; names where it stands and what
            is allowed.
    """
    if options is not None and not isinstance(options, Options):
        raise ConfigError(
            f"pg_options must be torchrelay.aggregation.Options, not {type(options).__name__}"
        )
    environ = os.environ if environ is None else environ
    found = next((path for path in files or configuration_files() if path.is_file()), None)
    from_file = {} if found is None else _read(found)
    from_environment = load(Aggregation, environ)
    values = {
        name: getattr(from_environment, name)
        if variable(Aggregation, name) in environ
        else from_file.get(name, field.default)
        for name, field in _FIELDS.items()
    }
    return Aggregation(**{**values, **({} if options is None else options.settings)})


def _read(path: Path) -> dict[str, Any]:
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=("#", ";"))
    try:
        parser.read_string(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for section in parser.sections():
        if section not in _SECTIONS:
            raise ConfigError(
                f"{path}: no such section [{section}]; there are {', '.join(_SECTIONS)}"
            )
        for key, text in parser.items(section):
            values.update(_setting(section, key, text, f"{path}, [{section}] {key}"))
    return values


def _setting(section: str, key: str, text: str, origin: str) -> dict[str, Any]:
    """What one line of the file sets."""
    if section == "backend.dummy":
        if key not in _DUMMY:
            raise ConfigError(f"{origin}: no such key; [{section}] has {', '.join(_DUMMY)}")
        return {_DUMMY[key]: parse_value(text, _FIELDS[_DUMMY[key]], origin)}
    if section != "general":
        return {}  # of a link this machine does not use; `backend` says so
    if key not in _GENERAL:
        raise ConfigError(f"{origin}: no such key; [general] has {', '.join(_GENERAL)}")
    known = _GENERAL[key]
    if isinstance(known, str):
        return {known: parse_value(text, _FIELDS[known], origin)}
    _check(known, text, origin)
    if key != "backend":
        return {}
    if text in _REPLACED:
        warnings.warn(
            f"{origin} = {text}: this plane needs a network card's own driver and is not offered; "
            "shared "
            "memory is used within a host, and TCP between hosts, or the switch that [general] "
            "switch = host:port names; no controller is asked",
            stacklevel=2,
        )
        return {"plane": "auto"}
    return {"plane": text}


def _check(kind: Any, text: str, origin: str) -> None:
    if isinstance(kind, tuple):
        if text not in map(str, kind):
            raise ConfigError(
                f"{origin} = {text!r}: the value must be one of {', '.join(map(str, kind))}"
            )
        return
    if kind is bool:
        kind = {
            "1": True,
            "true": True,
            "yes": True,
            "0": False,
            "false": False,
            "no": False,
        }.__getitem__
    try:
        value = kind(text.lower())
    except (ValueError, KeyError):
        raise ConfigError(
            f"{origin} = {text!r}: the value must be a number, or true or false"
        ) from None
    if isinstance(value, (int, float)) and value < 0:
        raise ConfigError(f"{origin} = {text!r}: the value must be at least 0")
