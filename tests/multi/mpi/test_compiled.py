"""Communications under torch.compile: one graph, the same order, the same gradients.

The compiler does not know what moves the bytes, so most run over one backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from grads import grad_of
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator


def program(comm: Communicator, x: Tensor, w: Tensor) -> Tensor:
    h = comm.Allreduce(x * w, mpi.MPI_SUM).sin()
    comm.Allreduce(h, mpi.MPI_SUM)  # ignored, and yet run backward on all ranks
    h = comm.Reduce_scatter_block(torch.cat([h] * comm.size), mpi.MPI_SUM)
    g = comm.Allgather(h, 0)
    return comm.Alltoall(g.view(comm.size, -1) * w.sum(), 1, 0, 1)


@mpi_test((1, 3), on=("sml",))
def test_compiled_program_has_the_eager_gradients(comm: Communicator) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = torch.arange(4.0, dtype=torch.float64) + comm.rank
        ours, theirs = (
            torch.full((4,), 2.0 + step, dtype=torch.float64, requires_grad=True) for _ in range(2)
        )
        wanted, got = program(comm, x, theirs), None
        (wanted * (comm.rank + 1)).sum().backward()
        got = compiled(comm, x, ours)
        (got * (comm.rank + 1)).sum().backward()
        assert torch.allclose(got, wanted) and torch.allclose(grad_of(ours), grad_of(theirs))


def functions(comm: Communicator) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Name and function of a float64 tensor of shape (size, 2)."""
    n, r = comm.size, comm.rank
    above, below = (r + 1) % n, (r - 1) % n
    replicated = comm.replace(convention="replicated")
    grid = comm.Cart([n], [True])
    assert grid is not None

    def ring(x: Tensor) -> Tensor:
        comm.Send(x * 3, above, 4)
        return comm.Recv(torch.empty_like(x), below, 4) * x

    yield "Allreduce MAX", lambda x: comm.Allreduce(x * (r + 1), mpi.MPI_MAX)
    yield "Allreduce MIN", lambda x: comm.Allreduce(x * (r + 1), mpi.MPI_MIN)
    yield "Allreduce PROD", lambda x: comm.Allreduce(x + r, mpi.MPI_PROD)
    yield "Bcast_", lambda x: comm.Bcast_(x * (r + 1), n - 1)
    yield "Reduce_", lambda x: comm.Reduce_(x * (r + 1), mpi.MPI_SUM, n - 1)
    yield "Gather", lambda x: comm.Gather(x * (r + 1), 0, 0)
    yield "Scatter", lambda x: comm.Scatter(x * (r + 1), 0, 1, n - 1)
    yield "Scan", lambda x: comm.Scan(x * (r + 1), mpi.MPI_SUM)
    yield "Exscan", lambda x: comm.Exscan(x * (r + 1), mpi.MPI_SUM)
    yield "Sendrecv", lambda x: comm.Sendrecv(x * (r + 1), above, below)
    yield "replicated Reduce_", lambda x: replicated.Reduce_(x * (r + 1), mpi.MPI_SUM, n - 1)
    yield "replicated Bcast_", lambda x: replicated.Bcast_(x * (r + 1), n - 1)
    yield "Allgatherv", lambda x: comm.Allgatherv(x * (r + 1))
    yield "Scatterv", lambda x: comm.Scatterv(x * (r + 1), [1] * n, n - 1)
    yield "Reduce_scatter", lambda x: comm.Reduce_scatter(x * (r + 1), mpi.MPI_SUM, 0, 1)
    yield "Allreduce LAND", lambda x: x * comm.Allreduce(x.detach() > n, mpi.MPI_LAND)
    yield (
        "Allreduce MAX of integers",
        lambda x: x * comm.Allreduce(x.detach().long() + r, mpi.MPI_MAX),
    )
    yield "Allreduce MAXLOC", lambda x: comm.Allreduce(x * (r + 1), mpi.MPI_MAXLOC).values
    yield "Scan MAX", lambda x: comm.Scan(x * (r + 1), mpi.MPI_MAX)
    yield "Reduce_ MAX", lambda x: comm.Reduce_(x * (r + 1), mpi.MPI_MAX, n - 1)
    yield "Reduce_scatter_block MAX", lambda x: comm.Reduce_scatter_block(x * (r + 1), mpi.MPI_MAX)
    yield "Halo_exchange", lambda x: grid.Halo_exchange(x * (r + 1), 1, [0])
    if n > 1:  # a message to oneself waits for its receiver
        yield "Send and Recv", ring
    yield (
        "replicated Allreduce",
        lambda x: replicated.Allreduce(replicated.Replicate(x) * r, mpi.MPI_SUM),
    )
    yield "replicated Allgather", lambda x: replicated.Allgather(x * (r + 1), 1)


@mpi_test((1, 2), on=("sml",))
def test_every_function_compiles_to_its_eager_values_and_gradients(comm: Communicator) -> None:
    for name, function in functions(comm):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        theirs, ours = (
            (
                torch.arange(2.0 * comm.size, dtype=torch.float64).view(-1, 2) + comm.rank + 1
            ).requires_grad_()
            for _ in range(2)
        )
        wanted = function(theirs)
        mpi.backward((wanted * (comm.rank + 2)).sum())
        got = compiled(ours)
        mpi.backward((got * (comm.rank + 2)).sum())
        assert torch.allclose(got, wanted), name
        assert torch.allclose(grad_of(ours), grad_of(theirs)), name


@mpi_test((3,), on=("sml",))  # one rank's parts are equal ones
def test_what_a_graph_cannot_hold_runs_outside_of_it(comm: Communicator) -> None:
    """Parts of other lengths than equal ones, and ``torch.func`` transforms: the graph breaks, the
    values are right.
    """
    n, r = comm.size, comm.rank
    x = torch.arange(4.0 * n, dtype=torch.float64).view(n, 4) + r
    lengths = [3] + [1] * (n - 1) if n > 1 else [4]
    rows = torch.arange(sum(lengths) * 2.0, dtype=torch.float64).view(-1, 2)

    def scatter(x: Tensor) -> Tensor:
        return comm.Scatter(x * 2, 0, lengths[r], 0) + 1

    def borders(x: Tensor) -> Tensor:
        return comm.Alltoall(x * 2, 0, 0, n * len(x) if r == 0 else 0) + 1

    def transformed(x: Tensor) -> Tensor:
        return (
            torch.func.grad(lambda t: comm.Allreduce(t.sin() * (r + 1), mpi.MPI_SUM).sum())(x * 2)
            + 1
        )

    for function, given in ((scatter, rows), (borders, x), (transformed, x)):
        torch._dynamo.reset()
        with torch.no_grad():
            wanted = function(given)
            got = torch.compile(function, backend="aot_eager")(given)
        assert torch.equal(got, wanted), function.__name__
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"unequal parts|torch.func"):
            torch.compile(function, fullgraph=True, backend="aot_eager")(given)


@mpi_test((3,), on=("sml",))
def test_two_steps_run_outside_of_the_graph(comm: Communicator) -> None:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def message(x: Tensor) -> Tensor:
        sent, received = comm.Isend(x * 2, above), comm.Irecv(torch.empty_like(x), below)
        return received.Wait() + comm.Wait(sent)

    def collectives(x: Tensor) -> Tensor:
        handle = comm.Iallreduce(x * (comm.rank + 1), mpi.MPI_SUM)
        again = comm.Iallreduce(x * 3, mpi.MPI_SUM)
        return handle.Wait() * 2 + again.Wait()

    for function in (message, collectives):
        torch._dynamo.reset()
        ours, theirs = (torch.arange(4.0, dtype=torch.float64).requires_grad_() for _ in range(2))
        wanted = function(theirs)
        mpi.backward(wanted.sum() * (comm.rank + 2))
        got = torch.compile(function, backend="aot_eager")(ours)
        mpi.backward(got.sum() * (comm.rank + 2))
        assert torch.equal(got, wanted) and torch.equal(grad_of(ours), grad_of(theirs)), (
            function.__name__
        )


@mpi_test((2, 3))
def test_a_compiled_function_takes_other_communicators(comm: Communicator) -> None:
    torch._dynamo.reset()
    kinds = ("sum", "replicated")  # whose backward pass communicates, and does not

    def function(c: Communicator, x: Tensor) -> Tensor:
        return c.Allreduce(c.Sendrecv(x, (c.rank + 1) % c.size, (c.rank - 1) % c.size), mpi.MPI_SUM)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    parts = (comm, comm.Split(0, -comm.rank), comm.Split(comm.rank % 2, comm.rank))
    for _, kind, part in itertools.product(range(2), kinds, parts):
        assert part is not None
        c = part.replace(convention=kind)
        ours, theirs = (torch.full((2,), comm.rank + 1.0, requires_grad=True) for _ in range(2))
        wanted = function(c, theirs)
        mpi.backward(wanted.sum() * (comm.rank + 1))
        got = compiled(c, ours)
        mpi.backward(got.sum() * (comm.rank + 1))
        assert torch.equal(got, wanted) and torch.equal(grad_of(ours), grad_of(theirs))


@mpi_test((2, 3))
def test_compiled_and_eager_communications_form_one_chain(comm: Communicator) -> None:
    torch._dynamo.reset()
    double = torch.compile(
        lambda x: comm.Allreduce(2 * x, mpi.MPI_SUM), fullgraph=True, backend="aot_eager"
    )
    x = torch.ones(3, requires_grad=True)
    y = comm.Allreduce(double(comm.Allreduce(x, mpi.MPI_SUM)), mpi.MPI_SUM)
    (y if comm.rank == 0 else y.detach() + 0 * y).sum().backward()
    assert grad_of(x).tolist() == [2.0 * comm.size**2] * 3


@mpi_test((2, 3))
def test_compiled_communications_without_a_gradient_stay_out_of_the_chain(
    comm: Communicator,
) -> None:
    torch._dynamo.reset()
    metric = torch.compile(
        lambda x: comm.Allreduce(x, mpi.MPI_SUM), fullgraph=True, backend="aot_eager"
    )
    for mode in (torch.no_grad, torch.inference_mode):
        x = torch.ones(3, requires_grad=True)
        y = comm.Allreduce(x, mpi.MPI_SUM)
        with mode():
            assert metric(y.detach()).tolist() == [float(comm.size**2)] * 3
        mpi.backward(y.sum() if comm.rank == 0 else None)
        assert grad_of(x).tolist() == [1.0] * 3


@mpi_test((2,), on=("sml",))
def test_inductor(comm: Communicator) -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: comm.Allreduce(x.sin(), mpi.MPI_SUM).cos(), fullgraph=True)
    x = torch.arange(4.0, requires_grad=True)
    function(x).sum().backward()
    assert torch.allclose(
        grad_of(x), -(comm.size * x.sin()).sin().detach() * comm.size * x.cos().detach()
    )
