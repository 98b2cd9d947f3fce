"""The public API of torchrelay.mpi in one process, without mpirun."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrelay import mpi
from torchrelay.compat import mpi4torch
from torchrelay.errors import ArgumentError, GraphError, MismatchError, OperationTimeoutError
from torchrelay.mpi import _headers, _wait
from torchrelay.mpi._settings import changed


def test_everything_public_can_be_imported() -> None:
    for module in (mpi, mpi4torch):
        assert all(hasattr(module, name) for name in module.__all__)


def test_one_process_is_the_smallest_world() -> None:
    comm = mpi.COMM_WORLD
    x = torch.ones(3, requires_grad=True)
    y = comm.Allgather(comm.Allreduce(2 * x, mpi.MPI_SUM), 0)
    y.sum().backward()
    assert comm.size == 1 and x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_gradcheck_needs_no_help_in_one_process() -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: mpi.COMM_WORLD.Allreduce(t, mpi.MPI_PROD), x)
    assert torch.autograd.gradgradcheck(lambda t: mpi.COMM_WORLD.Allreduce(t, mpi.MPI_PROD), x)


def test_mpi4torch_names_give_the_same_functions() -> None:
    x = torch.ones(3, requires_grad=True)
    comm = mpi4torch.COMM_WORLD
    handle = comm.Isend(x, 0, 0)
    res1 = comm.Recv(mpi4torch.JoinDummies(torch.empty(3), [handle.dummy]), 0, 0)
    res2 = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [res1]))
    mpi4torch.JoinDummies(res1, [res2]).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3


def test_handles_of_collectives_take_dummies() -> None:
    x = torch.ones(3, requires_grad=True)
    handle = mpi.COMM_WORLD.Iallreduce(2 * x, mpi.MPI_SUM)
    mpi.JoinDummiesHandle(handle, [x.sum()]).Wait().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3


def ring(comm: mpi4torch.MPI_Communicator, x: Tensor) -> Tensor:
    handle = comm.Isend(x, 0, 0)
    res1 = comm.Recv(mpi4torch.JoinDummies(torch.empty(3), [handle.dummy]), 0, 0)
    res2 = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [res1]))
    total = comm.Allreduce(comm.Bcast_(res1 * 2, 0), mpi4torch.MPI_SUM)
    return mpi4torch.JoinDummies(comm.Gather(total, 0, 0), [res2])


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_functions_take_communicators_of_mpi4torch() -> None:
    script: Any = torch.jit.script
    for function in (ring, script(ring)):
        x = torch.ones(3, requires_grad=True)
        y = function(mpi4torch.COMM_WORLD, x)
        y.sum().backward()
        assert x.grad is not None and (y.tolist(), x.grad.tolist()) == ([2.0] * 3, [2.0] * 3)


def test_copies_of_a_communicator_are_itself() -> None:
    world = mpi.COMM_WORLD
    for comm in (world, world.replace("replicated"), world.Dup(), world.Cart([1])):
        model: Any = nn.Linear(1, 1)
        model.comm = comm
        assert copy.copy(comm) is copy.deepcopy(model).comm is comm


def test_pickled_worlds_keep_their_settings_and_class() -> None:
    for world in (mpi.COMM_WORLD, mpi4torch.COMM_WORLD):
        assert pickle.loads(pickle.dumps(world)) is world
        comm = world.replace("replicated", "ignore")
        found = pickle.loads(pickle.dumps(comm))
        assert type(found) is type(comm)
        assert (found.convention, found.unreachable_policy) == ("replicated", "ignore")


def test_large_results_may_be_changed_in_place() -> None:
    """numpy allocates them."""
    x = torch.ones(1 << 20, requires_grad=True)
    y = mpi.COMM_WORLD.Allreduce(x, mpi.MPI_SUM)
    y /= 2
    mpi.COMM_WORLD.Bcast_(y, 0)
    y.sum().backward()
    assert x.grad is not None and x.grad.eq(0.5).all()


def test_a_profiler_records_communications() -> None:
    with torch.profiler.profile() as profile:
        mpi.COMM_WORLD.Allreduce(torch.ones(2, requires_grad=True), mpi.MPI_SUM).sum().backward()
    assert "torchrelay.mpi.Allreduce" in {event.name for event in profile.events()}


def test_errors_name_the_call() -> None:
    with pytest.raises(ArgumentError, match="axis 3"):
        mpi.COMM_WORLD.Allgather(torch.ones(2), 3)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, "sum"])
def test_only_reductions_of_mpi_are_taken(op: Any) -> None:
    comm, x = mpi.COMM_WORLD, torch.ones(2)
    name = "sum" if op == "sum" else "ReduceOp.SUM"
    for call in (
        comm.Allreduce,
        comm.Scan,
        comm.Reduce_scatter_block,
        comm.Iallreduce,
        lambda x, op: comm.Reduce_(x, op, 0),
    ):
        with pytest.raises(ArgumentError, match=rf"\(MPI_SUM, ...\), not {name}"):
            call(x, op)


@pytest.mark.parametrize("given", [1.0, np.ones(2)])
def test_only_tensors_are_taken(given: Any) -> None:
    comm, grid = mpi.COMM_WORLD, mpi.COMM_WORLD.Cart([1])
    assert grid is not None
    for call in (
        lambda: comm.Allreduce(given, mpi.MPI_SUM),
        lambda: comm.Allreduce(given, mpi.MPI_LAND),
        lambda: comm.Allreduce(given, mpi.MPI_MAXLOC),
        lambda: comm.Iallreduce(given, mpi.MPI_MAX),
        lambda: comm.Bcast_(given, 0),
        lambda: comm.Reduce_(given, mpi.MPI_MAX, 0),
        lambda: comm.Scan(given, mpi.MPI_LXOR),
        lambda: comm.Gather(given, 0, 0),
        lambda: comm.Allgather(given, 0),
        lambda: comm.Scatter(given, 0, 1, 0),
        lambda: comm.Alltoall(given, 0, 0, 1),
        lambda: comm.Alltoallv(given, [1]),
        lambda: comm.Reduce_scatter(given, mpi.MPI_SUM, 0, 1),
        lambda: comm.Reduce_scatter_block(given, mpi.MPI_SUM),
        lambda: grid.Halo_exchange(given),
        lambda: comm.Send(given, 0),
        lambda: comm.Recv(given, 0),
        lambda: comm.Irecv(given, 0),
        lambda: comm.Sendrecv(given, 0, 0),
    ):
        with pytest.raises(ArgumentError, match=r"a tensor is needed, not (float|ndarray)"):
            call()


def test_wrong_arguments_are_named_with_what_to_pass() -> None:
    comm, x = mpi.COMM_WORLD, torch.ones(2)
    for call, sentence in (
        (lambda: comm.Allgather(x, 1.0), "axis must be an integer, not float"),  # type: ignore[arg-type]
        (lambda: comm.Alltoall(x, 0, None, 1), "axis must be an integer, not NoneType"),  # type: ignore[arg-type]
        (lambda: comm.Irecv(0, x), "a tensor is needed, not int"),  # type: ignore[arg-type]
        (lambda: comm.Irecv(x, "0"), "source must be an integer, not str"),  # type: ignore[arg-type]
        (lambda: comm.Irecv(x, 0, None), "tag must be an integer, not NoneType"),  # type: ignore[arg-type]
        (lambda: comm.Isend(0, x), "dest must be an integer, not Tensor"),  # type: ignore[arg-type]
        (lambda: comm.Irecv(x, 1), "which has ranks 0 to 0"),
        (lambda: comm.Irecv(x.to_sparse(), 0), "pass a dense one that has values"),
        (lambda: comm.Recv(x.to("meta"), 0), "pass a dense one that has values"),
        (lambda: comm.Wait(x), "Wait takes what Isend, Irecv .* returned, not Tensor"),  # type: ignore[arg-type]
        (lambda: comm.Allreduce(x, mpi.MPI_BAND), "pass a tensor of integers or bool"),
        (lambda: comm.Iallreduce(x, mpi.MPI_BXOR), "pass a tensor of integers or bool"),
        (lambda: comm.Allreduce(x + 1j, mpi.MPI_MAX), r"pass a real tensor, such as"),
        (lambda: comm.Allreduce(x + 1j, mpi.MPI_MAXLOC), r"pass a real tensor, such as"),
        (lambda: comm.Scan(x, mpi.MPI_MAXLOC), "only Allreduce takes it"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            call()


def test_a_timeout_of_a_private_group_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        def Test(self) -> bool:
            raise OperationTimeoutError(
                "rank 1 did not arrive within 2 s; is it stuck? A longer timeout can be given to "
                "init_process_group",
                ranks=(1,),
            )

    monkeypatch.setattr(_wait.process, "failed", lambda error: error)
    call = _wait.Named(mpi.COMM_WORLD, "Barrier()")
    with changed(grace_s=0.0), pytest.raises(OperationTimeoutError) as caught:
        _wait.finish(Late(), call)
    assert "rank 1 did not take part" in str(caught.value)
    assert str(caught.value).endswith("TORCHRELAY_MPI_TIMEOUT_S sets the time")


def test_overwritten_input_must_not_be_used_again() -> None:
    """A leaf always; with mpi4torch's names any input, as the original promises."""
    for comm in (mpi.COMM_WORLD, mpi4torch.COMM_WORLD):
        for use_result in (True, False):
            x = torch.ones(3, requires_grad=True)
            result = comm.Reduce_(x, mpi.MPI_SUM, 0)
            with pytest.raises(RuntimeError, match="overwritten"):
                (result + x if use_result else 2 * x).sum().backward()
            mpi.reset()
    x = torch.ones(3, requires_grad=True)
    t = 2 * x
    result = mpi4torch.COMM_WORLD.Bcast_(t, 0)
    with pytest.raises(RuntimeError, match="overwritten"):
        (result + t).sum().backward()
    (3 * mpi4torch.COMM_WORLD.Bcast_(2 * x, 0)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0] * 3
    mpi.reset()


def test_overwritten_leaf_may_be_trained_afterwards() -> None:
    """Parameters that start alike on all ranks: the result is dropped, or has been
    differentiated.
    """
    x = torch.ones(3, requires_grad=True)
    mpi.COMM_WORLD.Bcast_(x, 0)
    mpi.reset()
    (2 * x).sum().backward()
    result = mpi.COMM_WORLD.Bcast_(x, 0)
    result.sum().backward()
    (2 * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5.0] * 3


def test_hooks_of_an_overwritten_leaf_may_replace_its_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: grad.clamp(max=2.0))
    result = mpi.COMM_WORLD.Bcast_(x, 0)
    x.register_hook(lambda grad: 2 * grad)
    (3 * result).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 3
    result = mpi.COMM_WORLD.Bcast_(x, 0)
    with pytest.raises(GraphError, match="overwritten"):
        (result + x).sum().backward()
    mpi.reset()


def test_headers_that_differ_let_no_data_follow() -> None:
    """Each thread that tests them raises: after the first, others must not begin the data."""

    class Done:
        def Test(self) -> bool:
            return True

    def row_exchange(sent: Tensor, received: Tensor) -> Callable[[bool], Done]:
        def start(may_block: bool) -> Done:
            mine, theirs = received.view(2, -1)
            theirs.copy_(mine.copy_(sent)).view(torch.int64)[0] += 2  # of the digest
            return Done()

        return start

    transport = SimpleNamespace(
        size=2, idle_headers=[], row_exchange=row_exchange, begin_after=lambda comparison: None
    )
    lease = SimpleNamespace(comparisons=0)
    job = SimpleNamespace(failed=lambda error: error)
    comm: Any = SimpleNamespace(
        rank=0, size=2, name="both", transport=transport, lease=lease, job=job
    )
    comparison = _headers.Comparison(_wait.Named(comm, "Iallreduce"), ("Iallreduce",))
    for _ in range(2):
        with pytest.raises(MismatchError, match="the ranks of both make different calls"):
            comparison.Test()
    assert not transport.idle_headers
