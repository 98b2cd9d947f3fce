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

from torchrelay.config import Aggregation, check_value, load, parse_value, variable
from torchrelay.errors import ConfigError

__all__ = ["Options", "configuration_files", "resolve"]

_FIELDS = {field.name: field for field in dataclasses.fields(Aggregation)}

# Keys of the original's file, and the setting of each. Those with a type instead are only checked:
# torch knows the ranks.
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
    "controller_ip": "controller_ip",
    "controller_port": "controller_port",
    "timeout": "packet_timeout_s",  # in ms
    "timeout_threshold": "timeout_threshold",
    "timeout_threshold_increment": "timeout_threshold_increment",
    "switch": "switch",  # ours
    "exact": "exact",  # ours
}
_DUMMY = {"bandwidth": "dummy_bandwidth", "process_packets": "dummy_process_packets"}
_REPLACED = ("dpdk", "rdma")
_SECTIONS = ("general", "backend.dummy", *(f"backend.{name}" for name in _REPLACED))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Options:
    """Settings of one group, for ``init_process_group`` and ``new_group(pg_options=...)``.

    A field that is None is taken from the environment, from ``switchml.cfg``, or is the default of
    :class:`torchrelay.config.Aggregation`.

    Args:
        plane: the data plane: ``auto``, ``shm`` or ``dummy``.
        slot_bytes: size of the staging buffer of each rank.
        one_shot_bytes: an all-reduce takes one step if a rank reads at most this much of the
            others.
        mailbox_bytes: size of the buffer between each pair of ranks for send and recv.
        chunk_bytes: size of the pieces of messages between hosts; rank 0's value applies.
        switch: ``host`` or ``host:port`` of the aggregation switch; empty: none.
        controller_ip: host of a switch's controller, by which workers form a session; empty: none.
        controller_port: of the controller.
        exact: whether floating-point sums use TCP even if there is a switch.
        num_worker_threads: threads of each host that use the switch.
        max_outstanding_packets: packets of each host that the switch has not answered.
        packet_numel: elements of a packet to the switch, 64 or 256.
        packet_timeout_s: seconds after which an unanswered packet is sent again.
        timeout_threshold: timeouts of packets in a row, with no prompt answer in between, after
            which their timeout doubles.
        timeout_threshold_increment: the threshold grows by this each time it is reached.
        spin_us: microseconds for which a waiting rank spins before it sleeps.
        oversubscribed_yield_us: microseconds for which it then polls and yields, if there are more
            ranks than cores.
        dummy_bandwidth: bandwidth that the dummy data plane simulates, in Mbit/s; 0: unlimited.
        dummy_process_packets: whether the dummy data plane returns sums.

    Raises:
        ConfigError: a value has the wrong type or is not allowed.
    """

    plane: str | None = None
    slot_bytes: int | None = None
    one_shot_bytes: int | None = None
    mailbox_bytes: int | None = None
    chunk_bytes: int | None = None
    switch: str | None = None
    controller_ip: str | None = None
    controller_port: int | None = None
    exact: bool | None = None
    num_worker_threads: int | None = None
    max_outstanding_packets: int | None = None
    packet_numel: int | None = None
    packet_timeout_s: float | None = None
    timeout_threshold: int | None = None
    timeout_threshold_increment: int | None = None
    spin_us: int | None = None
    oversubscribed_yield_us: int | None = None
    dummy_bandwidth: float | None = None
    dummy_process_packets: bool | None = None

    def __post_init__(self) -> None:
        for name, value in self.settings.items():
            kind = type(_FIELDS[name].default)
            if not isinstance(value, (int, float) if kind is float else kind):
                raise ConfigError(
                    f"Options({name}={value!r}): the value must be of type {kind.__name__}"
                )
            check_value(value, _FIELDS[name], f"Options({name}=...)")

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
    """Return the setting of one line of the file."""
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
        value = parse_value(text, _FIELDS[known], origin)
        return {known: value / 1000 if key == "timeout" else value}
    _check(known, text, origin)
    if key != "backend":
        return {}
    if text in _REPLACED:
        warnings.warn(
            f"{origin} = {text}: this data plane needs a network card's own driver and is not "
            "offered; shared memory is used within a host, and TCP between hosts, or the switch "
            "that [general] controller_ip or switch = host:port names",
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
