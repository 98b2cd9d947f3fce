"""Settings of a group, from ``Options``, else ``TORCHRELAY_AGGREGATION_*``, else ``switchml.cfg``.

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

from torchrelay._names import names_options
from torchrelay.config import Aggregation, check_value, load, parse_value, setting
from torchrelay.errors import ConfigError

__all__ = ["Options", "configuration_files", "resolve"]

_FIELDS = {field.name: field for field in dataclasses.fields(Aggregation)}
_REPLACED = ("dpdk", "rdma")


@dataclasses.dataclass
class _Checked:
    """Keys of the file that set nothing but ``backend``: torch knows the ranks and has a store."""

    rank: int = setting(0, "", minimum=0)
    num_workers: int = setting(0, "", minimum=0)
    backend: str = setting("shm", "", allowed=("shm", "dummy", *_REPLACED))
    scheduler: str = setting("fifo", "", allowed=("fifo",))
    prepostprocessor: str = setting("bypass", "", allowed=("cpu_exponent_quantizer", "bypass"))
    instant_job_completion: bool = setting(False, "")
    controller_port: int = setting(50099, "", minimum=1)


_CHECKED = {field.name: field for field in dataclasses.fields(_Checked)}

# The settings of keys that have other names. `timeout` is in ms; the switch of SwitchML's workers
# runs on the host of its controller.
_RENAMED = {"timeout": _FIELDS["packet_timeout_s"], "controller_ip": _FIELDS["switch"]}
_KEYS = {
    "general": {**_CHECKED, **_RENAMED, **_FIELDS},
    "backend.dummy": {key: _FIELDS[f"dummy_{key}"] for key in ("bandwidth", "process_packets")},
}
_SECTIONS = (*_KEYS, *(f"backend.{name}" for name in _REPLACED))


class _Checks:
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_value(value, _FIELDS[name], f"Options: {name}")


_PartialSettings: Any = dataclasses.make_dataclass(
    "_PartialSettings",
    [(name, f"{type(field.default).__name__} | None", None) for name, field in _FIELDS.items()],
    bases=(_Checks,),
    frozen=True,
    kw_only=True,
    repr=False,
)


class Options(_PartialSettings):  # type: ignore[misc]
    """Settings of one group, for ``init_process_group`` and ``new_group(pg_options=...)``.

    Every field of :class:`torchrelay.config.Aggregation` is a keyword argument; the settings page
    describes them. One that is not given is taken from the environment, from ``switchml.cfg``, or
    is the default.

    Raises:
        ConfigError: a value has the wrong type or is not allowed.
    """

    @names_options(*_FIELDS)
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def configuration_files() -> tuple[Path, ...]:
    """Return the paths of configuration files; the first that exists is read."""
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
    """Return the settings of a group.

    Raises:
        ConfigError: a key or variable is unknown or invalid; the message names its origin and the
            allowed values.
    """
    if options is not None and not isinstance(options, Options):
        raise ConfigError(
            f"pg_options must be torchrelay.aggregation.Options, not {type(options).__name__}"
        )
    environ = os.environ if environ is None else environ
    found = next((path for path in files or configuration_files() if path.is_file()), None)
    settings = load(Aggregation, environ, file={} if found is None else _read(found))
    return settings if options is None else dataclasses.replace(settings, **options.settings)


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
            found = _setting(section, key, text, f"{path}, [{section}] {key}")
            values = {**found, **values} if key == "controller_ip" else {**values, **found}
    return values


def _setting(section: str, key: str, text: str, origin: str) -> dict[str, Any]:
    """Return the setting of one line of the file."""
    if section not in _KEYS:
        return {}  # the data plane is not offered, about which `backend` warns
    if key not in _KEYS[section]:
        raise ConfigError(f"{origin}: no such key; [{section}] has {', '.join(_KEYS[section])}")
    field = _KEYS[section][key]
    value = parse_value(text, field, origin)
    if key not in _CHECKED:
        return {field.name: value / 1000 if key == "timeout" else value}
    if value in _REPLACED:
        warnings.warn(
            f"{origin} = {text}: this data plane needs a network card's own driver and is not "
            "offered; shared memory is used within a host, and TCP between hosts, or the switch "
            "that [general] controller_ip or switch = host:port names",
            stacklevel=2,
        )
        value = "auto"
    return {"plane": value} if key == "backend" else {}
