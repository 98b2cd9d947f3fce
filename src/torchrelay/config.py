"""Settings: frozen dataclasses, one a room, read from the environment.

Each field is made by :func:`setting`, which holds its default, unit, meaning and allowed values. The
environment variable of field ``timeout_s`` of section ``mpi`` is ``TORCHRELAY_MPI_TIMEOUT_S``.
``docs/settings.md`` is generated from :data:`SECTIONS`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from torchrelay.errors import ConfigError

__all__ = [
    "SECTIONS",
    "Aggregation",
    "Checkpoint",
    "Host",
    "Mpi",
    "Parameters",
    "Section",
    "Switching",
    "TransportSettings",
    "check_value",
    "load",
    "parse_value",
    "section",
    "setting",
    "variable",
]


class Section:
    """A group of settings; subclasses are frozen dataclasses whose fields are made by :func:`setting`."""

    name: ClassVar[str]


S = TypeVar("S", bound=Section)

SECTIONS: dict[str, type[Section]] = {}


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    allowed: Collection[Any] = (),
    minimum: float | None = None,
) -> Any:
    """A field of a :class:`Section`: default, a phrase of meaning, unit, and what values are allowed."""
    metadata = {"doc": doc, "unit": unit, "allowed": tuple(allowed), "minimum": minimum}
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type[S]) -> type[S]:
    """Class decorator: freezes the dataclass and lists it in :data:`SECTIONS`."""
    frozen = dataclasses.dataclass(frozen=True)(cls)
    SECTIONS[cls.name] = frozen
    return frozen


def variable(cls: type[Section], field: str) -> str:
    """The environment variable that sets ``field``."""
    return f"TORCHRELAY_{cls.name}_{field}".upper()


def parse_value(text: str, field: dataclasses.Field[Any], origin: str) -> Any:
    """The value of ``field`` written as ``text``. ``origin`` (a variable, a file and key) goes into errors.

    Raises:
        ConfigError: ``text`` is not of the default's type, or not one of the allowed values.
    """
    kind: type[Any] = type(field.default)
    value: Any
    try:
        if kind is bool:
            value = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        else:
            value = kind(text)
    except (ValueError, KeyError):
        expected = "one of 1, true, yes, 0, false, no" if kind is bool else f"of type {kind.__name__}"
        raise ConfigError(f"{origin} = {text!r}: the value must be {expected}") from None
    check_value(value, field, origin)
    return value


def check_value(value: Any, field: dataclasses.Field[Any], origin: str) -> None:
    """Raises :class:`ConfigError` if ``value`` is not allowed for ``field``."""
    allowed, minimum = field.metadata["allowed"], field.metadata["minimum"]
    if allowed and value not in allowed:
        raise ConfigError(f"{origin} = {value!r}: the value must be one of {', '.join(map(str, allowed))}")
    if minimum is not None and not value >= minimum:
        raise ConfigError(
            f"{origin} = {value!r}: the value must be at least {minimum} {field.metadata['unit']}".rstrip()
        )


def load(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """The settings of one section: the environment's value where there is one, else the default.

    Raises:
        ConfigError: a value does not parse, or a ``TORCHRELAY_<SECTION>_...`` variable names no setting.
    """
    environ = os.environ if environ is None else environ
    fields = {variable(cls, field.name): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = variable(cls, "")
    for key in environ:
        if key.startswith(prefix) and key not in fields:
            raise ConfigError(f"{key}: no such setting; {cls.name} has {', '.join(sorted(fields))}")
    values = {f.name: parse_value(environ[key], f, key) for key, f in fields.items() if key in environ}
    return cls(**values)


@section
class Host(Section):
    """This host."""

    name = "host"

    id: str = setting(
        "",
        "ranks of one machine with different values count as ranks of different hosts, which share no memory: for "
        "containers without a common /proc, and for tests",
    )


@section
class Mpi(Section):
    """Differentiable MPI."""

    name = "mpi"

    timeout_s: float = setting(
        300.0,
        "how long a communication waits for other ranks before every rank gets an error",
        unit="s",
        minimum=0.0,
    )
    grace_s: float = setting(
        2.0,
        "how long a rank whose communication timed out waits for the others to say where they are",
        unit="s",
        minimum=0.0,
    )
    debug: bool = setting(
        False, "compare function, shape, dtype and grad mode between the ranks before each communication"
    )
    convention: str = setting(
        "sum",
        "what a gradient is the derivative of: the sum of all ranks' losses, or one loss that every rank holds a replica of",
        allowed=("sum", "replicated"),
    )
    unreached: str = setting(
        "raise",
        "what to do when a backward pass cannot reach all communications recorded before it",
        allowed=("raise", "warn", "ignore"),
    )
    chain_warning: int = setting(
        10_000,
        "warn when so many communications were recorded without a backward pass",
        unit="communications",
        minimum=1,
    )
    max_count: int = setting(
        2**31 - 1,
        "the most elements given to one MPI call; larger tensors go in pieces",
        unit="elements",
        minimum=1,
    )


@section
class Aggregation(Section):
    """The backend ``sml``."""

    name = "aggregation"

    plane: str = setting(
        "auto",
        "what carries the bytes: shared memory, and TCP between hosts (auto), shared memory alone, or a dummy that "
        "communicates nothing",
        allowed=("auto", "shm", "dummy"),
    )
    slot_bytes: int = setting(
        512 * 1024,
        "how much each rank stages at a time for the others to read; larger messages go in pieces",
        unit="bytes",
        minimum=4096,
    )
    one_shot_bytes: int = setting(
        64 * 1024,
        "an all-reduce is done in one step if a rank need not read more than this of the others",
        unit="bytes",
        minimum=0,
    )
    mailbox_bytes: int = setting(
        128 * 1024, "the buffer between each pair of ranks for send and recv", unit="bytes", minimum=4096
    )
    chunk_bytes: int = setting(
        1 << 20,
        "between hosts, messages go in pieces of this size: while one is on the wire, the next is added up in shared "
        "memory; rank 0's value counts",
        unit="bytes",
        minimum=4096,
    )
    interface: str = setting(
        "",
        "the address or device by which other hosts' ranks reach this one; empty: GLOO_SOCKET_IFNAME if it is set, else "
        "the way to the store's server",
    )
    spin_us: int = setting(
        50,
        "how long a waiting rank does nothing but look for one on another core before it sleeps",
        unit="us",
        minimum=0,
    )
    crowded_yield_us: int = setting(
        200,
        "how long it then looks while letting others run, where ranks are more than the cores they may use",
        unit="us",
        minimum=0,
    )
    dummy_bandwidth: float = setting(
        0.0,
        "how fast the dummy plane pretends to be; 0 takes no time",
        unit="Mbit/s",
        minimum=0.0,
    )
    dummy_process_packets: bool = setting(
        True,
        "the dummy plane answers sums as if all ranks held the same values, else leaves tensors as they are",
    )


@section
class Parameters(Section):
    """The adaptive parameter manager."""

    name = "parameters"

    timeout_s: float = setting(
        300.0, "how long an operation, a barrier or the start waits for other nodes", unit="s", minimum=0.0
    )
    num_channels: int = setting(
        1, "threads of a node that serve other nodes, each its share of the keys", unit="threads", minimum=1
    )
    max_rounds_per_s: float = setting(
        1000.0, "how often a channel acts on intents and exchanges updates at most", unit="1/s", minimum=0.1
    )
    sync_threshold: float = setting(
        0.0, "the smallest l2 norm of a replica's update that is sent while the replica lives", minimum=0.0
    )
    hysteresis_rounds: int = setting(
        10,
        "how long a relocated key stays before a replica elsewhere takes it over",
        unit="rounds",
        minimum=0,
    )
    max_unfinished: int = setting(
        1024,
        "asynchronous operations of a worker that have not ended; a further one first waits for another to end",
        unit="operations",
        minimum=1,
    )
    pool_size: int = setting(
        250_000,
        "samples drawn at a time by the sampling scheme pool, and used again until shuffled anew",
        unit="samples",
        minimum=1,
    )


@section
class Checkpoint(Section):
    """Sharded checkpoints."""

    name = "checkpoint"

    commit_timeout_s: float = setting(
        600.0,
        "how long the writer processes of an asynchronous save wait for each other's parts before it is discarded",
        unit="s",
        minimum=0.1,
    )


@section
class Switching(Section):
    """Model switching and the shared cache."""

    name = "switching"

    device: str = setting("auto", "where the arena lies: cpu, cuda, cuda:1, ...; auto is CUDA where present")
    arena_bytes: int = setting(
        1 << 30, "size of the arena, or of the shared cache of compat.pipeswitch", unit="bytes", minimum=512
    )
    parameter_bytes: int = setting(
        1 << 30,
        "the first part of compat.pipeswitch's shared cache, for parameters; a quarter of a smaller cache",
        unit="bytes",
        minimum=512,
    )
    socket: str = setting(
        "", "where compat.pipeswitch sends its cache; empty: a file of this user in $XDG_RUNTIME_DIR or /tmp"
    )
    timeout_s: float = setting(
        60.0,
        "how long sending and receiving a shared cache wait for the other process",
        unit="s",
        minimum=0.0,
    )


@section
class TransportSettings(Section):
    """Messages between nodes."""

    name = "transport"

    key_file: str = setting(
        "", "file with the job's CURVE keys, made by transport.create_key_file; empty: no encryption"
    )
    connect_timeout_s: float = setting(
        60.0, "how long nodes wait for each other at start", unit="s", minimum=0.0
    )
    heartbeat_s: float = setting(
        1.0, "how often a node tells the others that it lives", unit="s", minimum=0.01
    )
    silence_s: float = setting(
        10.0,
        "a node not heard of for this long is lost, and every operation says so; at least twice heartbeat_s",
        unit="s",
        minimum=0.1,
    )
    max_message_bytes: int = setting(1 << 30, "size limit of one message", unit="bytes", minimum=1)
    linger_s: float = setting(1.0, "how long closing waits for messages not sent yet", unit="s", minimum=0.0)
    zeromq: bool = setting(
        False,
        "the parameter manager's nodes speak over ZeroMQ, as they do whenever there is a key file; otherwise "
        "over plain sockets, which wake fewer threads for a request",
    )
    local_sockets: bool = setting(True, "Unix sockets instead of TCP between processes of one host")
    spin_s: float = setting(0.0, "how long a receiver polls before it sleeps", unit="s", minimum=0.0)
    io_threads: int = setting(1, "ZeroMQ's own threads", unit="threads", minimum=1)

    @property
    def uses_zeromq(self) -> bool:
        """Whether the parameter manager's nodes do."""
        return self.zeromq or bool(self.key_file)

    def __post_init__(self) -> None:
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"transport.silence_s = {self.silence_s:g}: it must be at least twice transport.heartbeat_s = "
                f"{self.heartbeat_s:g} s, or living nodes would be taken for lost"
            )
