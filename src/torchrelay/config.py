"""Settings: one frozen dataclass per component, read from the environment.

Each field is defined by :func:`setting`, with its default, unit, meaning and allowed values. The
environment variable of field ``timeout_s`` of section ``mpi`` is ``TORCHRELAY_MPI_TIMEOUT_S``.
``docs/settings.md`` is generated from :data:`SECTIONS`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

from torchrelay.errors import ConfigError

__all__ = [
    "SECTIONS",
    "Aggregation",
    "Checkpoint",
    "ElasticSettings",
    "Host",
    "Mpi",
    "Parameters",
    "PipeSwitch",
    "Section",
    "Switching",
    "TransportSettings",
    "check_value",
    "load",
    "parse_value",
    "setting",
    "unit_of",
    "variable",
]


def setting(
    default: Any,
    doc: str,
    *,
    allowed: Collection[Any] = (),
    minimum: float = 0,
    secret: bool = False,
) -> Any:
    """Define a field of a :class:`Section`.

    Args:
        default: also determines the type.
        doc: the meaning, as a phrase.
        allowed: the only values that are valid; empty: all.
        minimum: the smallest valid number.
        secret: it is not shown in the section's ``repr``.
    """
    metadata = {"doc": doc, "allowed": tuple(allowed), "minimum": minimum}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


SECTIONS: dict[str, type[Section]] = {}

# Ends of names, and the units that they stand for.
_UNITS = {"_us": "us", "_per_s": "1/s", "_s": "s", "_bytes": "bytes", "_gbps": "GB/s"}
# What Kubernetes sets in each pod for a Service whose name begins with "torchrelay".
_OF_SERVICE = re.compile(r"[^=]+(_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)|_PORT=\w+://)")
_BOOLS = dict.fromkeys(("1", "true", "yes"), True) | dict.fromkeys(("0", "false", "no"), False)


@dataclass_transform(frozen_default=True)
class Section:
    """Base of the groups of settings: frozen dataclasses whose fields :func:`setting` defines.

    A subclass gives its name, ``class Mpi(Section, name="mpi")``, and is listed in
    :data:`SECTIONS`.
    """

    name: ClassVar[str]

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name
        SECTIONS[name] = dataclasses.dataclass(frozen=True)(cls)


S = TypeVar("S", bound=Section)


def unit_of(field: dataclasses.Field[Any]) -> str:
    """Return the unit of a setting, ``""`` if it has none."""
    return next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), "")


def variable(cls: type[Section], field: str) -> str:
    """Return the name of the environment variable that sets ``field``."""
    return f"TORCHRELAY_{cls.name}_{field}".upper()


def parse_value(text: str, field: dataclasses.Field[Any], origin: str) -> Any:
    """Parse ``text`` as a value of ``field``. Errors name its ``origin``: a variable, or a file and
    key.

    Raises:
        ConfigError: ``text`` does not have the type of the default, or is not allowed.
    """
    kind: type[Any] = type(field.default)
    try:
        value: Any = _BOOLS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{origin} = {text!r}: the value must be {_expected(kind)}") from None
    check_value(value, field, origin)
    return value


def check_value(value: Any, field: dataclasses.Field[Any], origin: str) -> None:
    """Raise :class:`ConfigError` if ``value`` is not allowed for ``field``."""
    kind = type(field.default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ConfigError(f"{origin} = {value!r}: the value must be {_expected(kind)}")
    allowed, minimum = field.metadata["allowed"], field.metadata["minimum"]
    if allowed and value not in allowed:
        raise ConfigError(
            f"{origin} = {value!r}: the value must be one of {', '.join(map(str, allowed))}"
        )
    is_number = isinstance(field.default, (int, float))
    if is_number and not value >= minimum:  # not <, because of nan
        raise ConfigError(
            f"{origin} = {value!r}: the value must be at least {minimum} {unit_of(field)}".rstrip()
        )


def load(
    cls: type[S],
    environ: Mapping[str, str] | None = None,
    *,
    file: Mapping[str, Any] | None = None,
    origin: str = "",
) -> S:
    """Read one section from ``environ`` (default: the process environment).

    Args:
        file: values from a file, which variables override.
        origin: names the file in errors.

    Raises:
        ConfigError: a value is invalid, or a ``TORCHRELAY_...`` variable or a key of the file is
            unknown.
    """
    environ = os.environ if environ is None else environ
    named = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    fields = {variable(cls, name): field for name, field in named.items()}
    _check_variables(cls, environ, fields)
    values = dict(file or {})
    for key, value in values.items():
        if key not in named:
            raise ConfigError(
                f"{origin} has the unknown key {key}; known are {', '.join(sorted(named))}"
            )
        check_value(value, named[key], f"{origin} {key}")
    values |= {
        f.name: parse_value(environ[key], f, key) for key, f in fields.items() if key in environ
    }
    return cls(**values)


def _check_variables(
    cls: type[Section], environ: Mapping[str, str], known: Collection[str]
) -> None:
    sections = tuple(f"TORCHRELAY_{name}_".upper() for name in (*SECTIONS, "test"))
    for key in environ:
        if not key.startswith("TORCHRELAY_") or key in known:
            continue
        if _OF_SERVICE.match(f"{key}={environ[key]}"):
            continue
        if key.startswith(variable(cls, "")):
            raise ConfigError(f"{key}: no such setting; {cls.name} has {', '.join(sorted(known))}")
        if not key.startswith(sections):
            raise ConfigError(
                f"{key}: no such setting; variables begin with {', '.join(sorted(sections))}"
            )


def _expected(kind: type[Any]) -> str:
    return f"one of {', '.join(_BOOLS)}" if kind is bool else f"of type {kind.__name__}"


class Host(Section, name="host"):
    """This host."""

    id: str = setting(
        "",
        "distinguishes hosts: ranks of one machine with different values share no memory. For "
        "containers without a common /proc, and for tests",
    )


class Mpi(Section, name="mpi"):
    """Differentiable MPI."""

    timeout_s: float = setting(
        300.0, "how long a communication waits for other ranks before every rank raises"
    )
    grace_s: float = setting(
        2.0, "how long a rank that timed out waits for the state of the others"
    )
    debug: bool = setting(
        False,
        "compare also whether all ranks record a collective, and shape and dtype of each message",
    )
    unreachable_policy: str = setting(
        "raise",
        "what to do if a backward pass cannot reach all communications recorded before it",
        allowed=("raise", "warn", "ignore"),
    )
    chain_warning: int = setting(
        10_000, "warn after this many communications without a backward pass", minimum=1
    )
    max_count: int = setting(
        2**31 - 1,
        "largest number of elements in one MPI call; larger tensors are sent in pieces",
        minimum=1,
    )


class Aggregation(Section, name="aggregation"):
    """The backend ``sml``."""

    plane: str = setting(
        "auto",
        "the data plane: shared memory, with TCP between hosts (auto); shared memory only (shm); "
        "or one that communicates nothing (dummy)",
        allowed=("auto", "shm", "dummy"),
    )
    switch: str = setting(
        "",
        "host or host:port of the aggregation switch through which hosts sum: all_reduce with SUM "
        "or AVG of int32, float32, float16 and bfloat16. Empty: hosts use TCP only",
    )
    unencrypted_switch: bool = setting(
        False,
        "use the switch also if there is a key: what goes through it is not encrypted, because a "
        "switch adds integers that it must read",
    )
    exact: bool = setting(
        False,
        "whether floating-point sums, which a switch quantizes, use TCP even if there is a switch",
    )
    num_worker_threads: int = setting(4, "threads of each host that use the switch", minimum=1)
    max_outstanding_packets: int = setting(
        256, "packets of each host, over all threads, that the switch has not answered", minimum=1
    )
    packet_numel: int = setting(256, "elements of a packet to the switch", allowed=(64, 256))
    packet_timeout_s: float = setting(
        0.01, "a packet is sent again if the switch does not answer for this long", minimum=1e-4
    )
    timeout_threshold: int = setting(
        100,
        "timeouts of packets in a row, with no prompt answer in between, after which their timeout "
        "doubles",
        minimum=1,
    )
    timeout_threshold_increment: int = setting(
        100, "the threshold grows by this each time it is reached"
    )
    compression: str = setting(
        "none",
        "how floating-point sums and averages (all_reduce, reduce, reduce_scatter) are sent to "
        "other hosts: int8, with about a quarter of the bytes; bf16, with half; none: exactly",
        allowed=("none", "int8", "bf16"),
    )
    spin_us: int = setting(50, "how long a waiting rank spins before it sleeps")
    dummy_bandwidth: float = setting(
        0.0, "bandwidth in Mbit/s that the dummy data plane simulates; 0: unlimited"
    )
    dummy_process_packets: bool = setting(
        True,
        "the dummy data plane returns sums as if all ranks had the same values; otherwise tensors "
        "stay unchanged",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_value(getattr(self, field.name), field, field.name)
        if not self.num_worker_threads <= self.max_outstanding_packets <= 1 << 13:
            raise ConfigError(
                f"num_worker_threads = {self.num_worker_threads}, max_outstanding_packets = "
                f"{self.max_outstanding_packets}: there must be a packet for each thread, and at "
                "most 8192 packets"
            )


class Parameters(Section, name="parameters"):
    """The adaptive parameter manager."""

    timeout_s: float = setting(
        300.0, "how long an operation, a barrier or the creation of a table waits for other nodes"
    )
    num_channels: int = setting(
        1, "threads of a node that serve other nodes; each serves a part of the keys", minimum=1
    )
    max_rounds_per_s: float = setting(
        1000.0, "highest rate at which a channel acts on intents and exchanges updates", minimum=0.1
    )
    sync_threshold: float = setting(0.0, "smallest l2 norm of an update that a live replica sends")
    hysteresis_rounds: int = setting(
        10, "rounds that a relocated key stays before another node's replica becomes the owner"
    )
    max_unfinished: int = setting(
        1024,
        "largest number of unfinished asynchronous operations of a worker; another one waits",
        minimum=1,
    )
    pool_size: int = setting(
        250_000, "size of the pool that the sampling scheme pool draws and reuses", minimum=1
    )


class Checkpoint(Section, name="checkpoint"):
    """Sharded checkpoints."""

    commit_timeout_s: float = setting(
        600.0,
        "how long the writer processes of an asynchronous save wait for each other before they "
        "discard it",
        minimum=0.1,
    )
    memory_bytes: int = setting(
        0,
        "how much of a host's memory a job's checkpoints may take there, with the copies for "
        "another host; 0: half of it",
    )
    memory_ttl_s: float = setting(
        900.0, "how long checkpoints stay in memory after the last trainer of a host has left"
    )


class Switching(Section, name="switching"):
    """Model switching: the server's variables, and the table ``[server]`` of its models file."""

    device: str = setting(
        "auto", "device of the arena: cpu, cuda, cuda:1, ...; auto: CUDA if present"
    )
    arena_bytes: int = setting(
        1 << 30, "size of the arena, or of the shared cache of compat.pipeswitch", minimum=512
    )
    workers: int = setting(2, "worker processes: one computes, the others stand by", minimum=1)
    threads: int = setting(0, "torch threads of a worker; 0: torch's default")
    link_gbps: float = setting(
        0.0, "on the CPU, rate of an emulated link to the arena; 0: the memory's own rate"
    )
    request_bytes: int = setting(64 << 20, "maximum size of the tensors of one request", minimum=1)
    queue_limit: int = setting(256, "maximum number of waiting requests", minimum=1)
    run_timeout_s: float = setting(60.0, "a worker that computes one request for longer is ended")
    start_timeout_s: float = setting(
        120.0, "how long a worker may take to start, or to build a model"
    )
    slice_s: float = setting(
        0.25,
        "how long a model that generates has the device while others of its priority wait for it",
        minimum=0.0,
    )
    stash_bytes: int = setting(
        8 << 30,
        "what the keys and values of sequences may take in host memory while other models run; "
        "beyond that, the oldest are dropped and computed again",
        minimum=0,
    )
    grouping: str = setting(
        "best",
        "how layers are grouped for copying; one group, or one for each layer, is for comparison",
        allowed=("best", "one", "layer"),
    )
    profile_folder: str = setting(
        "",
        "where profiles of models are kept between runs; empty: the server keeps them in the "
        "user's cache folder, a Switcher not at all",
    )
    grace_s: float = setting(10.0, "how long a server that is stopped may finish queued requests")
    host: str = setting("127.0.0.1", "address that the server listens on")
    port: int = setting(8000, "port that the server listens on; 0: any free one")
    allowed_hosts: str = setting(
        "",
        "host names, separated by commas, by which clients may address the server, beside "
        "localhost, this machine's name and IP addresses; *: any",
    )
    api_key: str = setting(
        "", "a secret that every request except health checks must carry; empty: none", secret=True
    )
    repository_control: bool = setting(False, "clients may load and unload the models of the file")
    allowed_origins: str = setting(
        "",
        "origins, such as https://app.example, separated by commas, whose web pages may use the "
        "server; *: any",
    )
    access_log: bool = setting(False, "write a line for each request to standard error")
    tls_certificate: str = setting(
        "", "file with a certificate chain in PEM format, to serve HTTPS; empty: plain HTTP"
    )
    tls_key: str = setting("", "file with the certificate's key; empty: it is in the same file")


class ElasticSettings(Section, name="elastic"):
    """Training that goes on when members come and go."""

    address: str = setting(
        "",
        "where this member listens, as host:port; others must reach it there. Empty: a free port "
        "of the address of TORCHRELAY_TRANSPORT_INTERFACE, else of the default route",
    )
    peers: str = setting(
        "",
        "addresses, host:port, separated by commas, one of which a new member must reach; a name "
        "stands for all addresses that it has. Members at these found the job. Empty: this "
        "member's own",
    )
    token: str = setting(
        "", "a secret that all members of the job have, if there is no transport key", secret=True
    )
    timeout_s: float = setting(
        30.0,
        "how long a member may be silent before the others go on without it; longer than the "
        "slowest step",
        minimum=0.1,
    )
    min_size: int = setting(1, "the fewest members that take a step", minimum=1)
    tie_breaker: str = setting(
        "", "address of the member whose half goes on where the members are cut in equal halves"
    )
    wait_s: float = setting(
        600.0, "how long a member that must not go on waits for the others before it raises"
    )


class PipeSwitch(Section, name="pipeswitch"):
    """The shared cache of ``compat.pipeswitch``, beside ``TORCHRELAY_SWITCHING_DEVICE`` and
    ``_ARENA_BYTES``.
    """

    parameter_bytes: int = setting(
        1 << 30,
        "part of the shared cache that is for parameters; a quarter of a smaller cache",
        minimum=512,
    )
    socket: str = setting(
        "",
        "path of the socket over which the cache is sent; empty: a file of this user in "
        "$XDG_RUNTIME_DIR or /tmp",
    )
    timeout_s: float = setting(
        60.0, "how long sending or receiving the cache waits for the other process"
    )


class TransportSettings(Section, name="transport"):
    """Messages between hosts."""

    key_file: str = setting(
        "",
        "file with the job's key, from `torchrelay key create`: what leaves a host is encrypted. "
        "Only its owner may read it, or, if that is root, also its group. Empty: no encryption, "
        "unless there is TORCHRELAY_TRANSPORT_KEY",
    )
    key: str = setting("", "the key itself, instead of its file", secret=True)
    connect_timeout_s: float = setting(60.0, "how long nodes wait for each other to connect")
    heartbeat_s: float = setting(1.0, "interval between the heartbeats of a node", minimum=0.01)
    peer_timeout_s: float = setting(
        10.0,
        "a node that sends nothing for this long is lost, and operations raise; at least twice "
        "heartbeat_s",
        minimum=0.1,
    )
    max_message_bytes: int = setting(1 << 30, "size limit of one message", minimum=1)
    interface: str = setting(
        "",
        "address or network device at which other hosts reach this one, or several, separated by "
        "commas: the first that is not loopback; empty: GLOO_SOCKET_IFNAME if set, else the device "
        "of the route to the store",
    )
    local_sockets: bool = setting(
        True, "use Unix sockets instead of TCP between processes of one host"
    )

    def __post_init__(self) -> None:
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"transport.peer_timeout_s = {self.peer_timeout_s:g} s: it must be at least twice "
                f"transport.heartbeat_s = {self.heartbeat_s:g} s, or live nodes would be reported "
                "lost"
            )
