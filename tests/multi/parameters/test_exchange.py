"""The sum of row gradients over processes: by owner, exact, with bytes that do not grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from nodes import Server
from torchrelay.errors import MismatchError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.parameters._exchange import GradientExchange, sum_by_key
from torchrelay.parameters._topology import topology_of
from torchrelay.world import Ranks, World

if TYPE_CHECKING:
    from ranks import RunProcesses

KEYS, ROWS, DIM = 4000, 1000, 16
ROW_BYTES = 8 + 4 * DIM  # a key and its values


def _gradient(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    keys = torch.randperm(KEYS, generator=generator)[:ROWS]
    return keys.sort().values, torch.randn(ROWS, DIM, generator=generator)


def _exchange(world: World) -> int:
    topology = topology_of(Ranks(world.connect(), world.rank, world.size), world.master_addr)
    exchange = GradientExchange(topology.ranks, lambda: topology.group, 60.0)
    parts = [_gradient(rank) for rank in range(world.size)]
    expected_keys, expected = sum_by_key(*(torch.cat(each) for each in zip(*parts, strict=True)))
    mine = expected_keys % world.size == world.rank
    keys, values = parts[world.rank]
    sums = exchange.sum(keys, values, keys % world.size)
    sent_bytes = exchange.sent_bytes
    assert torch.equal(sums[0], expected_keys[mine])
    assert torch.equal(sums[1], expected[mine])  # bit for bit: added in the order of ranks

    sizes, is_finite = exchange.sizes(len(sums[0]), world.rank != 1)
    assert not is_finite and sum(sizes) == len(expected_keys)
    whole = exchange.gather(*sums, sizes)
    assert torch.equal(whole[0], expected_keys) and torch.equal(whole[1], expected)
    exchange.barrier()
    return sent_bytes


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_are_exact_and_each_row_is_sent_once(run_processes: RunProcesses, size: int) -> None:
    for result in run_processes(_exchange, size):
        assert result.ok, result.error
        headers = (size - 1) * 8 * (1 + max(3, size))
        share = result.value - headers
        assert 0.8 * (1 - 1 / size) * ROWS * ROW_BYTES < share <= ROWS * ROW_BYTES


@pytest.mark.processes(2)
def test_the_whole_gradient_is_gathered_where_it_is_used(world: World) -> None:
    with Table.create(8, 2, optimizer=optim.sgd(1.0), reduction="sum") as table:
        module, optimizer = Embedding(8, 2, table=table), table.optimizer()
        keys = torch.tensor([1, 2 + world.rank])
        for _ in range(2):  # accumulated
            module(keys).sum().backward()
        gradient, found = module.weight.grad, module.weight.keys
        assert gradient is not None and found is not None
        assert gradient.shape == (3, 2) and found.tolist() == [1, 2, 3]
        assert gradient[:, 0].tolist() == [4.0, 2.0, 2.0]
        gradient.mul_(0.5)
        assert module.weight.grad is gradient and gradient.norm() == 12**0.5
        module(keys).sum().backward()  # onto what was scaled
        optimizer.step()
        assert table.pull(torch.arange(4))[:, 0].tolist() == [0.0, -4.0, -2.0, -2.0]
        table.sync()
        optimizer.zero_grad()
        assert module.weight.grad is None


@pytest.mark.processes(2)
def test_a_process_that_looks_at_the_gradient_alone_is_named(world: World) -> None:
    with Table.create(8, 2, optimizer=optim.sgd(1.0)) as table:
        module, optimizer = Embedding(8, 2, table=table), table.optimizer()
        module(torch.tensor([1])).sum().backward()
        gradient = module.weight.grad
        assert gradient is not None
        use = gradient.norm if world.rank == 0 else optimizer.step
        with pytest.raises(MismatchError, match=r"weight\.grad"):
            use()
        table.sync()


@pytest.mark.processes(2)
def test_a_table_that_is_closed_leaves_its_topology_to_the_others(world: World) -> None:
    with Table.create(8, 2, optimizer=optim.sgd(1.0)) as table:
        other = Server(4, topology=table._server.topology)
        module, optimizer = Embedding(8, 2, table=table), table.optimizer()
        keys = torch.arange(4)
        for step in (1, 2):
            optimizer.zero_grad()
            module(keys).sum().backward()
            optimizer.step()
            table.sync()
            assert table.pull(keys).eq(-step).all()
            other.close()
