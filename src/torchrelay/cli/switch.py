"""``torchrelay switch``: an aggregation switch, with live statistics."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from torchrelay._output import optional_output
from torchrelay.errors import ConfigError

if TYPE_CHECKING:
    from torchrelay.aggregation.switch import DataPlane, SwitchServer, SwitchStats

__all__ = ["switch"]

_Announce = Callable[[dict[str, str]], None]
_Show = Callable[["SwitchStats"], None]

_NAME = "torchrelay switch"
_INTERVAL_S = 1.0  # between two looks at the statistics


def switch(
    data_plane: Annotated[
        Literal["udp", "xdp"],
        typer.Option(help="udp: in user space; xdp: in the kernel, at the ports."),
    ] = "udp",
    address: str = typer.Option("127.0.0.1", help="udp: the IPv4 address to bind; 0.0.0.0 is all."),
    port: int = typer.Option(
        48864, min=0, max=65535, help="UDP port; 0: any free one; 48864: the 16 from there on."
    ),
    interfaces: str = typer.Option(
        "", help="xdp: the network interfaces, one worker each: eth1,eth2."
    ),
    mode: Annotated[
        Literal["generic", "native"],
        typer.Option(help="xdp: native runs in the driver, if that supports it."),
    ] = "generic",
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
        False, "--json", help="One line of JSON each second, and at the end."
    ),
) -> None:
    """Run a switch that sums what the workers of each session send it, until SIGINT or SIGTERM.

    Nothing is encrypted: run it in a network you trust.
    """
    from torchrelay.aggregation.switch import (  # noqa: PLC0415 - imports torch
        Controller,
        SwitchServer,
        UdpDataPlane,
        Uplink,
        XdpDataPlane,
    )

    index, slash, num_racks = rack.partition("/")
    if not (slash and index.isdecimal() and num_racks.isdecimal()):
        raise ConfigError(f"switch --rack {rack}: it must be I/N, such as 0/2")
    if data_plane == "xdp" and not interfaces:
        raise ConfigError("switch --data-plane xdp needs --interfaces")
    if uplink and controller_port >= 0:
        raise ConfigError(
            "switch: a rack's switch (--uplink) has no controller, because a session's workers "
            "in other racks could not join it"
        )
    plane: DataPlane
    if data_plane == "xdp":
        plane = XdpDataPlane(interfaces.split(","), port, mode=mode)
    else:
        plane = UdpDataPlane(address, port)
    server = SwitchServer(
        plane,
        max_sessions=max_sessions,
        max_slots=max_slots,
        allow=filter(None, allow.split(",")),
        uplink=Uplink(uplink, int(index), int(num_racks)) if uplink else None,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(optional_output(_NAME))  # for the last table
        stack.enter_context(server)
        start = {"switch": server.address, "data_plane": plane.name}
        if controller_port >= 0:
            controller = Controller(server, controller_address, controller_port)
            start["controller"] = stack.enter_context(controller).address
        if metrics_port >= 0:
            start["metrics"] = _serve_metrics(stack, server, metrics_port)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        announce, show = _json_printers() if json_lines else _live_table(stack)
        announce, show = optional_output(_NAME)(announce), optional_output(_NAME)(show)
        with contextlib.suppress(KeyboardInterrupt):
            announce(start)  # whoever reads it may end the command at once
            while True:
                server.check()
                show(server.stats())
                time.sleep(_INTERVAL_S)
        show(server.stats())


def _serve_metrics(stack: contextlib.ExitStack, server: SwitchServer, port: int) -> str:
    """Serve the statistics until the stack ends; return where."""
    from torchrelay import _telemetry, metrics  # noqa: PLC0415

    _telemetry.publish(lambda: server.stats().samples())
    return f"http://127.0.0.1:{stack.enter_context(metrics.serve(port)).port}/metrics"


def _json_printers() -> tuple[_Announce, _Show]:
    """Return what prints a line of JSON: for the start, and for statistics."""

    def write(values: dict[str, Any]) -> None:
        print(json.dumps(values) + "\n", end="", flush=True)  # at once: it may be interrupted

    return write, lambda stats: write(stats.as_dict())


def _live_table(stack: contextlib.ExitStack) -> tuple[_Announce, _Show]:
    """Return what prints the start, and what updates a table in the terminal; elsewhere only the
    last one is printed.
    """
    console = Console()
    live = stack.enter_context(Live(console=console, auto_refresh=False))

    def announce(start: dict[str, str]) -> None:
        console.print(", ".join(f"{name} {value}" for name, value in start.items()), soft_wrap=True)
        console.file.flush()

    return announce, lambda stats: live.update(_view(stats), refresh=True)


def _view(stats: SwitchStats) -> Table:
    """Return a table of packets by session; what was dropped is below."""
    from torchrelay import _native  # noqa: PLC0415

    names, num_columns = list(_native.switch_stats()), _native.SWITCH_NUM_SESSION_STATS
    columns, others = names[:num_columns], names[num_columns:]
    table = Table(
        *("session", "workers", "idle", *columns, "sent again by"),
        title=f"{stats.data_plane} switch {stats.address}:{stats.port}",
        caption=", ".join(f"{name} {stats.counts[name]:,}" for name in others),
    )
    for index, session in enumerate(stats.sessions):
        again = ", ".join(
            f"{rank}: {worker.retransmissions}"
            for rank, worker in enumerate(session.workers)
            if worker.retransmissions
        )
        place = str(index), str(session.shape.num_workers), f"{session.idle_s:.0f} s"
        table.add_row(*place, *(f"{session.counts[name]:,}" for name in columns), again)
    table.add_row("all", "", "", *(f"{stats.counts[name]:,}" for name in columns), "")
    return table
