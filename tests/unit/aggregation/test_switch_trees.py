"""Trees of switches: leaves below a root, losses on each hop, restarts, and what is refused."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import namespaces
from switch_ports import beyond_select, missing_for_xdp, within
from torchrelay.aggregation.switch import (
    SwitchClient,
    SwitchServer,
    UdpDataPlane,
    Uplink,
    XdpDataPlane,
)
from torchrelay.config import Aggregation
from torchrelay.errors import (
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    UnavailableError,
)
from waiting import eventually

SMALL = Aggregation(num_worker_threads=2, max_outstanding_packets=16, packet_numel=64)
PATIENCE_S = 60.0


def leaf(above: str, rack: int, num_racks: int = 2, loss: float = 0.0) -> SwitchServer:
    plane = UdpDataPlane(port=0, drop_ingress=loss, drop_egress=loss)
    return SwitchServer(plane, uplink=Uplink(above, rack, num_racks))


@dataclass
class Tree:
    """A root with racks below it."""

    root: SwitchServer
    leaves: list[SwitchServer]

    def clients(self, size: int, stack: contextlib.ExitStack, **more: Any) -> list[SwitchClient]:
        """The workers of a session, in equal racks."""
        session_id = secrets.randbits(64)

        def connect(rank: int) -> SwitchClient:
            address = self.leaves[rank * len(self.leaves) // size].address
            return SwitchClient(address, rank, size, session_id, SMALL, **more)

        return [stack.enter_context(client) for client in at_once(connect, range(size))]


def at_once(function: Callable[[Any], Any], arguments: Any) -> list[Any]:
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


@contextlib.contextmanager
def tree(num_racks: int = 2, loss: float = 0.0) -> Iterator[Tree]:
    with contextlib.ExitStack() as stack:
        plane = UdpDataPlane(port=0, drop_ingress=loss, drop_egress=loss)
        root = stack.enter_context(SwitchServer(plane))
        leaves = [
            stack.enter_context(leaf(root.address, rack, num_racks, loss))
            for rack in range(num_racks)
        ]
        yield Tree(root, leaves)


def check_sums(clients: list[SwitchClient], count: int = 3000) -> None:
    size = len(clients)

    def work(client: SwitchClient) -> tuple[torch.Tensor, torch.Tensor]:
        integers = torch.arange(count, dtype=torch.int32) * (client.rank + 1)
        floats = torch.arange(count, dtype=torch.float32) * (client.rank + 1)
        floats[5] = torch.inf if client.rank == size - 1 else 1.0
        client.all_reduce(integers, PATIENCE_S)
        client.all_reduce(floats, PATIENCE_S)
        return integers, floats

    found = at_once(work, clients)
    factor = size * (size + 1) // 2
    exact = torch.arange(count, dtype=torch.float64) * factor
    largest_exponent = (count * size).bit_length()
    for integers, floats in found:
        assert torch.equal(integers, torch.arange(count, dtype=torch.int32) * factor)
        assert torch.equal(floats, found[0][1]), "all workers get the same bits"
        assert floats[5] == torch.inf
        errors = (floats - exact).abs()
        errors[5] = 0
        assert (errors <= size**2 * 2.0**largest_exponent / 2**32 + exact * 2.0**-24).all()


@pytest.mark.parametrize(("num_racks", "size"), [(1, 1), (1, 3), (2, 2), (2, 6), (3, 6)])
def test_racks_sum_as_one_session(num_racks: int, size: int) -> None:
    with tree(num_racks) as one, contextlib.ExitStack() as stack:
        clients = one.clients(size, stack)
        for _ in range(3):
            check_sums(clients)
        root, leaves = one.root.stats().counts, [leaf.stats().counts for leaf in one.leaves]
        assert root["completed"] == leaves[0]["completed"] > 0
        assert root["received"] == sum(counts["forwarded"] for counts in leaves)
        # More, where a slow machine makes workers ask again.
        assert leaves[0]["received"] >= size // num_racks * leaves[0]["completed"]


def test_losses_on_each_hop_are_recovered() -> None:
    with tree(loss=0.03) as one, contextlib.ExitStack() as stack:
        check_sums(one.clients(4, stack))
        root = one.root.stats().counts
    assert root["dropped_ingress"] and root["dropped_egress"] and root["answered_again"]


def test_a_tree_of_three_levels() -> None:
    with tree() as one, contextlib.ExitStack() as stack:
        middle = one.leaves
        bottom = [
            stack.enter_context(leaf(middle[rack // 2].address, rack, 4)) for rack in range(4)
        ]
        check_sums(Tree(one.root, bottom).clients(8, stack))


def test_sessions_end_above_with_their_workers() -> None:
    with tree() as one, contextlib.ExitStack() as stack:
        first, second = one.clients(2, stack), one.clients(4, stack)
        check_sums(first)
        assert len(one.root.stats().sessions) == 2
        for client in first:
            client.close()
        eventually(lambda: len(one.root.stats().sessions) == 1)
        check_sums(second)


def test_a_missing_worker_is_named_by_every_rack() -> None:
    with tree() as one, contextlib.ExitStack() as stack:
        clients = one.clients(4, stack)

        def work(client: SwitchClient) -> tuple[int, ...]:
            with pytest.raises(OperationTimeoutError, match="it waits for worker") as caught:
                client.all_reduce(torch.ones(1000), timeout_s=2.0)
            return caught.value.ranks

        # The other rack's switch knows only that this rack's sum is missing.
        assert at_once(work, clients[:3]) == [(2, 3), (2, 3), (3,)]


def test_processes_may_have_many_descriptors() -> None:
    with beyond_select(), tree() as one, contextlib.ExitStack() as stack:
        check_sums(one.clients(4, stack))


@pytest.mark.parametrize("restarted", ["root", "leaf"])
def test_a_restarted_switch_is_an_error_of_all_workers(restarted: str) -> None:
    """Of a leaf, once its own workers have joined again: until then the others wait for them."""
    with tree() as one, contextlib.ExitStack() as stack:
        clients = one.clients(4, stack)
        check_sums(clients)
        old = one.root if restarted == "root" else one.leaves[0]
        port = old.plane.port
        old.close()
        uplink = Uplink(one.root.address, 0, 2) if restarted == "leaf" else None
        stack.enter_context(SwitchServer(UdpDataPlane(port=port), uplink=uplink))

        def work(client: SwitchClient) -> None:
            with pytest.raises(PeerLostError, match="restarted"):
                client.all_reduce(torch.ones(10_000), PATIENCE_S)

        if restarted == "leaf":
            at_once(work, clients[:2])
            SwitchClient(one.leaves[0].address, 0, 4, clients[0].session_id, SMALL).close()
            at_once(work, clients[2:])
        else:
            at_once(work, clients)
        with contextlib.ExitStack() as again:
            check_sums(one.clients(4, again))


def test_a_leaf_without_its_root_admits_nobody() -> None:
    with SwitchServer(UdpDataPlane(port=0)) as root:
        address = root.address
    with (
        leaf(address, 0) as one,
        pytest.raises(UnavailableError, match=f"switch {address}: no answer within 0.5 s"),
    ):
        SwitchClient(one.address, 0, 2, 1, SMALL, timeout_s=3.0)


def test_what_does_not_fit_is_refused() -> None:
    with tree() as one:
        with pytest.raises(UnavailableError, match="3 workers cannot be divided among 2 racks"):
            SwitchClient(one.leaves[0].address, 0, 3, 1, SMALL)
        with pytest.raises(UnavailableError, match="for the workers 0 to 1 of 4, not for worker 2"):
            SwitchClient(one.leaves[0].address, 2, 4, 1, SMALL)
    with pytest.raises(ConfigError, match="rack 2 of 2"):
        Uplink("switch", 2, 2)


def test_racks_that_disagree_on_the_number_of_workers_never_add_their_sums() -> None:
    with tree() as one, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(SwitchClient(leaf.address, rank, size, 1, SMALL))
            for leaf, rank, size in zip(one.leaves, (0, 3), (2, 4), strict=True)
        ]

        def work(client: SwitchClient) -> None:
            with pytest.raises(OperationTimeoutError):
                client.all_reduce(torch.ones(10), timeout_s=1.0)

        at_once(work, clients)


@pytest.mark.skipif(bool(missing_for_xdp()), reason=missing_for_xdp() or "possible")
def test_an_xdp_switch_is_a_root_but_no_leaf() -> None:
    """The leaves are the hosts behind its ports."""
    with namespaces.star(2) as star, contextlib.ExitStack() as stack:
        plane = stack.enter_context(
            within(star.switch, lambda: XdpDataPlane(["port0", "port1"], 0, mode="generic"))
        )
        with pytest.raises(ConfigError, match="xdp has no uplink"):
            SwitchServer(plane, uplink=Uplink("10.0.0.1", 0, 2))
        root = stack.enter_context(SwitchServer(plane))

        def start(rack: int) -> SwitchServer:
            return leaf(f"10.78.{rack}.1:{plane.port}", rack)

        leaves = [
            stack.enter_context(within(pid, lambda rack=rack: start(rack)))  # type: ignore[misc]
            for rack, pid in enumerate(star.pids)
        ]
        session_id = secrets.randbits(64)

        def connect(rank: int) -> SwitchClient:
            return within(
                star.pids[rank // 2],
                lambda: SwitchClient(leaves[rank // 2].address, rank, 4, session_id, SMALL),
            )

        clients = [stack.enter_context(client) for client in at_once(connect, range(4))]
        check_sums(clients)
        assert root.stats().counts["completed"] == leaves[0].stats().counts["completed"]
