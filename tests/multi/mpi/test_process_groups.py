"""Communicators of process groups beside what else uses the groups."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from grads import grad_of
from multi.mpi.runner import GROUPS, mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi import Communicator
from torchrelay.mpi._collectives import Allgather
from torchrelay.mpi.transports._group import GroupTransport


@mpi_test((2, 3), on=GROUPS)
def test_subgroup_and_mesh_dimension(comm: Communicator) -> None:
    members = [0, comm.size - 1]
    group = dist.new_group(members)
    if comm.rank in members:
        with Communicator.from_group(group) as part:
            x = torch.full((2,), float(part.rank + 1), requires_grad=True)
            ((part.rank + 1) * part.Allreduce(x, mpi.MPI_SUM)).sum().backward()
            assert grad_of(x).tolist() == [3.0, 3.0]
    else:
        with pytest.raises(ArgumentError, match="not a process group"):
            Communicator.from_group(group)
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("rows", "columns"))
    rows, columns = (Communicator.from_group(mesh[name]) for name in ("rows", "columns"))
    assert (rows.size, columns.size) == (comm.size, 1)
    assert rows.Allgather(torch.tensor([comm.rank]), 0).tolist() == list(range(comm.size))


@mpi_test((2, 3), on=GROUPS)
def test_a_single_element_of_any_stride(comm: Communicator) -> None:
    """torch calls it contiguous, but does not view it as bytes."""
    x = torch.arange(5.0).as_strided((1,), (5,), 2)
    assert comm.Bcast_(x if comm.rank == 0 else torch.zeros(5).as_strided((1,), (5,)), 0) == 2
    assert comm.Allgather(x, 0).tolist() == [2.0] * comm.size
    if comm.rank == 0:
        comm.Send(x, 1, 0)
    elif comm.rank == 1:
        assert comm.Recv(torch.zeros(1), 0, 0).item() == 2


@mpi_test((2, 3), on=GROUPS)
def test_devices_that_have_backends_of_their_own_are_compared(comm: Communicator) -> None:
    """A device that is not here; calls refuse such tensors before they reach a communication."""
    with FakeTensorMode():
        x: Tensor = torch.empty(200, device="cuda")
    call = Allgather(comm, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupTransport, "takes", lambda self, device: True)
        with pytest.raises(MismatchError, match=r"axis=0\).*axis=0, on cuda\)"):
            call.forward(x if comm.rank else torch.empty(200))
    assert len(call.forward(torch.empty(200))) == 200 * comm.size


@mpi_test((2, 3), on=GROUPS)
def test_two_communicators_in_one_backward_pass(comm: Communicator) -> None:
    """A ring over one, a sum over the other; a rank without a loss takes part."""
    with comm.Dup() as other:
        x = torch.full((2,), float(comm.rank), requires_grad=True)
        above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        shifted = other.Sendrecv(comm.Allreduce(x, mpi.MPI_SUM), above, below)
        mpi.backward(None if comm.rank == 0 else (comm.rank * shifted).sum())
        assert grad_of(x).tolist() == [float(sum(range(comm.size)))] * 2


@mpi_test((2, 3), on=GROUPS)
def test_receives_from_any_rank_get_long_messages_in_the_order_of_their_sender(
    comm: Communicator,
) -> None:
    count = 1 << 16  # in bytes more than shared memory holds for a receiver
    with torch.no_grad():
        if comm.rank == 0:
            receives = range(2 * (comm.size - 1))
            handles = [comm.Irecv(torch.empty(count), mpi.MPI_ANY_SOURCE, 7) for _ in receives]
            got = [comm.Wait(handle) for handle in reversed(handles)]
            for x in got:
                assert torch.equal(x, x[0] + torch.arange(float(count)))
            firsts = [int(x[0]) for x in reversed(got)]
            assert sorted(firsts, key=lambda first: first // 1000) == [
                1000 * rank + 500 * turn for rank in range(1, comm.size) for turn in range(2)
            ]
        else:
            for turn in range(2):
                comm.Send(1000.0 * comm.rank + 500 * turn + torch.arange(float(count)), 0, 7)
        comm.Barrier()


@mpi_test((1, 2, 3, 5), on=("sml",))
def test_ranks_of_two_hosts_get_what_those_of_one_host_get(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHRELAY_HOST_ID", "ab"[comm.rank % 2])
        spread = Communicator.from_group(dist.new_group())
    rank, size = comm.rank, comm.size
    above, below = (rank + 1) % size, (rank - 1) % size

    def results(c: Communicator, x: Tensor) -> list[Tensor]:
        started = c.Iallreduce(x, mpi.MPI_MIN)
        part = c.Split(rank % 2, -rank)
        assert part is not None
        long = [c.Isend(x, above, 3), c.Isend(x, rank, 4)]  # before they are received
        with part:
            return [
                c.Allreduce(x, mpi.MPI_SUM),
                c.Allreduce(x > 3, mpi.MPI_LXOR),
                c.Bcast_(x * 1, size - 1),
                c.Reduce_(x * 1, mpi.MPI_MAX, 0),
                c.Gather(x[: rank + 1], 0, 0),
                c.Allgather(x[: rank + 1], 0),
                c.Scatter(x[:size], 0, 1, 0),
                c.Alltoallv(x[:size], [1] * size),
                c.Reduce_scatter_block(x[:size], mpi.MPI_SUM),
                c.Exscan(x, mpi.MPI_SUM),
                part.Allgather(x[:1], 0),
                part.Sendrecv(x, part.size - 1 - part.rank, mpi.MPI_ANY_SOURCE),
                c.Recv(x * 0, below, mpi.MPI_ANY_TAG),
                c.Recv(x * 0, rank, 4),
                started.Wait(),
                *(handle.Wait() for handle in long),
            ]

    with torch.no_grad():
        for count in (2 * size, 50_000):
            x = (torch.arange(count) * (rank + 1)) % 7 + 1.0
            for ours, expected in zip(results(spread, x), results(comm, x), strict=True):
                assert torch.equal(ours, expected)
    spread.Free()


@mpi_test((2, 3), on=GROUPS)
def test_messages_of_threads_with_communicators_of_their_own(comm: Communicator) -> None:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comms = [comm.Dup() for _ in range(3)]

    def exchange(thread: int) -> None:
        with torch.no_grad():
            for turn in range(200):
                sent = torch.tensor([comm.rank, thread, turn])
                assert comms[thread].Sendrecv(sent, above, below).tolist() == [below, thread, turn]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(exchange, range(3)))
    finally:
        sys.setswitchinterval(before)
    for each in comms:
        each.Free()


@mpi_test((2, 3), on=GROUPS)
def test_beside_ddp_with_autocast_over_the_same_group(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.full((4, 3), float(comm.rank + step)))
        mean = comm.Allreduce(y.float().mean(), mpi.MPI_SUM) / comm.size
        loss = comm.Allreduce((mean - comm.rank).square(), mpi.MPI_SUM)
        mpi.backward(loss)
        grads = [grad_of(p).reshape(-1) for p in model.parameters()]
        with torch.no_grad():
            every = comm.Allgather(torch.cat(grads).unsqueeze(0), 0)
        assert torch.equal(every, every[:1].expand_as(every)) and every.abs().sum() > 0
        model.zero_grad()


@mpi_test((2,), on=GROUPS)
def test_dtensors_in_and_out(comm: Communicator) -> None:
    """Their local tensors, under the convention of DTensor, in which a loss has replicas."""
    mesh = init_device_mesh("cpu", (2,))
    replicated = comm.replace(convention="replicated")
    x = torch.full((3,), float(comm.rank + 1), requires_grad=True)
    sharded = DTensor.from_local(x, mesh, [Shard(0)])
    twice, squares = 2 * sharded, lambda y: y.square().sum()
    assert isinstance(twice, DTensor)
    total = replicated.Allreduce(twice.to_local(), mpi.MPI_SUM)
    y = DTensor.from_local(total, mesh, [Replicate()])
    squares(y).to_local().backward()
    assert y.full_tensor().tolist() == [6.0] * 3 and grad_of(x).tolist() == [24.0] * 3
    for call in (
        lambda: comm.Allreduce(sharded, mpi.MPI_SUM),
        lambda: comm.Bcast_(sharded.detach(), 0),
        lambda: comm.Iallreduce(sharded, mpi.MPI_SUM),
        lambda: comm.Isend(sharded, 1 - comm.rank),
        lambda: comm.Irecv(sharded.detach(), 1 - comm.rank),
    ):
        with pytest.raises(ArgumentError, match=r"of a DTensor: communicate its to_local\(\)"):
            call()


@mpi_test((2,), on=GROUPS)
def test_results_of_functional_collectives(comm: Communicator) -> None:
    """They may not have arrived, and hold no memory of their own."""
    x = torch.full((3,), float(comm.rank + 1), requires_grad=True)
    names = ("all_gather_single_autograd", "all_gather_tensor_autograd")  # new and old
    gather = next(getattr(functional, name) for name in names if hasattr(functional, name))
    got = gather(x, 0, dist.group.WORLD)
    y = comm.Allreduce(got, mpi.MPI_SUM)
    mpi.backward(((comm.rank + 1) * y).sum())
    assert y.tolist() == [2.0] * 3 + [4.0] * 3
    assert grad_of(x).tolist() == [6.0] * 3  # both ranks' cotangents, of 3 each


class Contrast(nn.Module):
    """Embeddings whose loss compares those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(self, comm: Communicator, x: Tensor) -> Tensor:
        own = self(x)
        every = comm.Allgather(own, 0)
        return (own @ every.T).logsumexp(1).sum() * (comm.rank + 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@mpi_test((2,), on=GROUPS)
def test_beside_fsdp2_over_the_same_group(comm: Communicator) -> None:
    """FSDP gathers weights and scatters gradients between our communications, in both passes."""
    torch.manual_seed(0)
    whole, sharded = Contrast(), Contrast()
    sharded.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (comm.size,))
    for layer in (sharded.layers[0], sharded.layers[2], sharded):
        fully_shard(layer, mesh=mesh)
    for step in range(2):
        x = torch.linspace(-1, 1, 12).view(3, 4) + comm.rank + step
        losses = [model.loss(comm, x) for model in (whole, sharded)]
        mpi.backward(losses[0] + losses[1])
        assert torch.allclose(losses[0], losses[1])
        for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
            with torch.no_grad():
                mean = comm.Allreduce(grad_of(theirs), mpi.MPI_SUM) / comm.size
            grad = grad_of(ours)
            assert isinstance(grad, DTensor) and torch.allclose(grad.full_tensor(), mean, atol=1e-6)
        whole.zero_grad()
        sharded.zero_grad()


class Stage(nn.Module):
    """A stage of a pipeline, cut over the ranks of the stage.

    Several microbatches are in flight, each with a backward pass of its own.
    """

    def __init__(self, comm: Communicator, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.comm = comm.replace(convention="replicated")
        self.up = nn.Parameter(up.chunk(comm.size, 0)[comm.rank].clone())
        self.down = nn.Parameter(down.chunk(comm.size, 1)[comm.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        with mpi.chain():
            hidden = (self.comm.Replicate(x) @ self.up.T).tanh()
            y: Tensor = self.comm.Allreduce(hidden @ self.down.T, mpi.MPI_SUM)
        return y


@mpi_test((5,), on=("sml",))
def test_tensor_parallel_stages_of_a_pipeline(comm: Communicator) -> None:
    """Two stages of two ranks each; the fifth rank has no part in it."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("stages", "parts"))
    if comm.rank == 4:
        return
    tp = Communicator.from_group(mesh["parts"])
    index = mesh.get_local_rank("stages")
    torch.manual_seed(0)
    weights = [torch.randn(2, 6, 4).unbind() for _ in range(2)]
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    leaves = [w.clone().requires_grad_() for pair in weights for w in pair]
    y = x
    for up, down in ((leaves[0], leaves[1]), (leaves[2], leaves[3])):
        y = (y @ up.T).tanh() @ down
    (y - target).square().sum().backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        stage = Stage(tp, weights[index][0], weights[index][1].T.contiguous())
        pipe = schedule(
            PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("stages")),
            n_microbatches=4,
            loss_fn=lambda y, target: (y - target).square().sum(),
            scale_grads=False,
        )
        if index == 0:
            pipe.step(x)
        else:
            pipe.step(target=target)
        part = slice(3 * tp.rank, 3 * tp.rank + 3)
        assert torch.allclose(grad_of(stage.up), grad_of(leaves[2 * index])[part], atol=1e-4)
        down = grad_of(leaves[2 * index + 1])[part].T
        assert torch.allclose(grad_of(stage.down), down, atol=1e-4)
