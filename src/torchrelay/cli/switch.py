"""``torchrelay switch``: an aggregation switch, with live statistics."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from torchrelay.errors import ConfigError

if TYPE_CHECKING:
    from torchrelay.aggregation.switch import DataPlane, SwitchServer, SwitchStats, Uplink
    from torchrelay.metrics import Endpoint

__all__ = ["switch"]


class PlaneKind(str, Enum):
    """What aggregates the packets."""

    udp = "udp"
    xdp = "xdp"


class XdpMode(str, Enum):
    """How the kernel runs the XDP program."""

    auto = "auto"
    native = "native"
    generic = "generic"


def switch(
    data_plane: Annotated[
        PlaneKind, typer.Option(help="udp: in user space; xdp: in the kernel, at the ports.")
    ] = PlaneKind.udp,
    address: str = typer.Option("127.0.0.1", help="udp: the IPv4 address to bind; 0.0.0.0 is all."),
    port: int = typer.Option(
        48864, min=0, max=65535, help="UDP port; 0: any free one; 48864: the 16 from there on."
    ),
    interfaces: str = typer.Option(
        "", help="xdp: the network interfaces, one worker each: eth1,eth2."
    ),
    mode: Annotated[
        XdpMode,
        typer.Option(help="xdp: auto uses generic if native is unsupported or does not deliver."),
    ] = XdpMode.auto,
    uplink: str = typer.Option(
        "", help="udp: the switch above this one, HOST or HOST:PORT; needs --rack."
    ),
    rack: str = typer.Option(
        "0/1", help="With --uplink: this switch serves rack I of N, from 0: I/N."
    ),
    allow: str = typer.Option(
        "0.0.0.0/0", help="Networks whose workers may join: 10.1.0.0/16,10.2.0.4/32."
    ),
    max_sessions: int = typer.Option(64, min=1, help="Sessions at a time."),
    max_slots: int = typer.Option(8192, min=1, max=1 << 13, help="Slots of a session."),
    controller_port: int = typer.Option(
        -1, help="Serve SwitchML's controller there, over gRPC; 50099 is usual, 0 is any."
    ),
    controller_address: str = typer.Option(
        "127.0.0.1", help="The IPv4 address that the controller binds."
    ),
    metrics_port: int = typer.Option(
        -1, help="Serve Prometheus metrics there, on 127.0.0.1; 0 is any."
    ),
    json_lines: bool = typer.Option(
        False, "--json", help="One line of JSON each interval, and at the end."
    ),
    interval_s: float = typer.Option(1.0, min=0.05, help="Between two looks at the statistics."),
    drop_ingress: float = typer.Option(
        0.0, help="udp, for tests: the probability that a packet is lost."
    ),
    drop_egress: float = typer.Option(0.0, help="udp, for tests: the same for a result."),
    drop_seed: int = typer.Option(0, help="udp, for tests: of these losses."),
) -> None:
    """Run a switch that sums what the workers of each session send it, until SIGINT or SIGTERM.

    Nothing is encrypted: run it in a network you trust.
    """
    from torchrelay.aggregation.switch import (  # noqa: PLC0415 - imports torch
        Controller,
        SwitchServer,
        UdpDataPlane,
    )

    plane: DataPlane
    if data_plane == PlaneKind.xdp:
        plane = _xdp(interfaces, mode, port, drop_ingress + drop_egress)
    else:
        plane = UdpDataPlane(
            address, port, drop_ingress=drop_ingress, drop_egress=drop_egress, drop_seed=drop_seed
        )
    networks = [network for network in allow.split(",") if network]
    if uplink and controller_port >= 0:
        raise ConfigError(
            "switch: a rack's switch (--uplink) has no controller, because a session's workers "
            "in other racks could not meet there"
        )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            SwitchServer(
                plane,
                max_sessions=max_sessions,
                max_slots=max_slots,
                allow=networks,
                uplink=_uplink(uplink, rack),
            )
        )
        start = {"switch": server.address, "data_plane": plane.name}
        services: list[SwitchServer | Controller] = [server]
        if controller_port >= 0:
            controller = Controller(server, controller_address, controller_port)
            start["controller"] = stack.enter_context(controller).address
            services.append(controller)
        if metrics_port >= 0:
            port = stack.enter_context(_metrics(server, metrics_port)).port
            start["metrics"] = f"http://127.0.0.1:{port}/metrics"
        with _stop_signals() as stop:

            def is_on() -> bool:
                """Wait for an interval; whether to go on. Raises if a service has ended."""
                for service in services:
                    service.check()
                return not stop.wait(interval_s)

            report = _report_json if json_lines else _report_table
            report(server, start, is_on, interval_s)


def _xdp(interfaces: str, mode: XdpMode, port: int, drop: float) -> DataPlane:
    from torchrelay.aggregation.switch import XdpDataPlane  # noqa: PLC0415

    if not interfaces or drop:
        raise ConfigError(
            "switch --data-plane xdp needs --interfaces, and has no drop probabilities"
        )
    return XdpDataPlane(interfaces.split(","), port, mode=mode.value)


def _uplink(switch: str, rack: str) -> Uplink | None:
    from torchrelay.aggregation.switch import Uplink  # noqa: PLC0415

    index, slash, num_racks = rack.partition("/")
    if not (slash and index.isdecimal() and num_racks.isdecimal()):
        raise ConfigError(f"switch --rack {rack}: it must be I/N, such as 0/2")
    return Uplink(switch, int(index), int(num_racks)) if switch else None


def _metrics(server: SwitchServer, port: int) -> Endpoint:
    from torchrelay import _telemetry, metrics  # noqa: PLC0415
    from torchrelay.aggregation.switch._metrics import samples  # noqa: PLC0415

    _telemetry.publish(lambda: samples(server.stats()))
    return metrics.serve(port)


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Return an event that SIGINT and SIGTERM set, instead of their handlers."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_json(
    server: SwitchServer, start: dict[str, str], is_on: Callable[[], bool], interval_s: float
) -> None:
    from torchrelay.aggregation.switch._metrics import as_dict  # noqa: PLC0415

    print(json.dumps(start), flush=True)
    while is_on():
        print(json.dumps(as_dict(server.stats())), flush=True)
    print(json.dumps({**as_dict(server.stats()), "final": True}), flush=True)


def _report_table(
    server: SwitchServer, start: dict[str, str], is_on: Callable[[], bool], interval_s: float
) -> None:
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in start.items()), soft_wrap=True)
    sys.stdout.flush()
    last = server.stats()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while is_on():
            stats = server.stats()
            if console.is_terminal:
                live.update(
                    _view(stats, (stats.counts["received"] - last.counts["received"]) / interval_s),
                    refresh=True,
                )
            last = stats
    console.print(_view(server.stats(), None))


def _view(stats: SwitchStats, packets_per_s: float | None) -> Group:
    """Return the tables: packets by session, and what was dropped."""
    rate = "" if packets_per_s is None else f", {packets_per_s:,.0f} packets/s"
    title = f"{stats.data_plane} switch {stats.address}:{stats.port}{rate}"
    from torchrelay import _native  # noqa: PLC0415

    names, num_columns = list(_native.switch_stats()), _native.SWITCH_NUM_SESSION_STATS
    columns, others = names[:num_columns], names[num_columns:]
    sessions = Table("session", "workers", "idle", *columns, "sent again by", title=title)
    for index, session in enumerate(stats.sessions):
        again = ", ".join(
            f"{rank}: {worker.retransmissions}"
            for rank, worker in enumerate(session.workers)
            if worker.retransmissions
        )
        counts = [f"{session.counts[name]:,}" for name in columns]
        sessions.add_row(
            str(index), str(session.shape.num_workers), f"{session.idle_s:.0f} s", *counts, again
        )
    sessions.add_row("all", "", "", *(f"{stats.counts[name]:,}" for name in columns), "")
    trouble = Table(*others)
    trouble.add_row(*(f"{stats.counts[name]:,}" for name in others))
    return Group(sessions, trouble)
