"""The public API of torchrelay.mpi in one process, without mpirun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchrelay import mpi
from torchrelay.compat import mpi4torch
from torchrelay.errors import ArgumentError, OperationTimeoutError
from torchrelay.mpi import _wait
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
    comm = mpi.COMM_WORLD
    for call in (
        lambda: comm.Allreduce(given, mpi.MPI_SUM),
        lambda: comm.Bcast_(given, 0),
        lambda: comm.Reduce_(given, mpi.MPI_MAX, 0),
        lambda: comm.Send(given, 0),
        lambda: comm.Recv(given, 0),
        lambda: comm.Sendrecv(given, 0, 0),
    ):
        with pytest.raises(ArgumentError, match=r"a tensor is needed, not (float|ndarray)"):
            call()


def test_a_timeout_of_a_private_group_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        def Test(self) -> bool:
            raise OperationTimeoutError(
                "rank 1 did not arrive within 2 s; is it stuck? A longer timeout can be given to "
                "init_process_group",
                ranks=(1,),
            )

    monkeypatch.setattr(_wait, "failed", lambda error: error)
    call = _wait.Named(mpi.COMM_WORLD, "Barrier()")
    with changed(grace_s=0.0), pytest.raises(OperationTimeoutError) as caught:
        _wait.finish(Late(), call)
    assert str(caught.value).endswith("is it stuck? TORCHRELAY_MPI_TIMEOUT_S sets the time")


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_functions_start_communications_and_wait() -> None:
    """The original's example, from itself to itself."""

    def function(x: torch.Tensor, comm: mpi4torch.MPI_Communicator) -> torch.Tensor:
        handle = comm.Isend(x, comm.rank, 5)
        first = comm.Recv(mpi4torch.JoinDummies(torch.empty_like(x), [handle.dummy]), comm.rank, 5)
        sent = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [first]))
        receiving = comm.Irecv(torch.empty_like(x), 0, 6)
        sending = comm.Isend(3 * mpi4torch.JoinDummies(first, [sent]), 0, 6)
        second = comm.Wait(receiving)
        return mpi4torch.JoinDummies(second, [comm.Wait(sending)])

    def twice(x: torch.Tensor, comm: mpi4torch.MPI_Communicator) -> torch.Tensor:
        handle = comm.Irecv(torch.empty_like(x), 0, 7)
        comm.Send(x, 0, 7)
        return comm.Wait(handle) + comm.Wait(handle)

    for run in (function, torch.jit.script(function)):
        for _ in range(3):
            x = torch.arange(4.0).requires_grad_()
            y = run(x, mpi4torch.COMM_WORLD)
            assert y.tolist() == [0.0, 3.0, 6.0, 9.0]
            mpi.backward(y.square().sum())
            assert x.grad is not None and x.grad.tolist() == [0.0, 18.0, 36.0, 54.0]
    for run in (twice, torch.jit.script(twice)):
        with (
            torch.no_grad(),
            pytest.raises((ArgumentError, RuntimeError), match="already waited for"),
        ):
            run(torch.ones(2), mpi4torch.COMM_WORLD)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_functions_take_a_communicator() -> None:
    def function(x: torch.Tensor, comm: mpi4torch.MPI_Communicator) -> torch.Tensor:
        y = comm.Allreduce(x, mpi4torch.MPI_SUM) / comm.size
        comm.Allgather(x, 0)  # not used, and yet called
        z = comm.Reduce_(y * 2, mpi4torch.MPI_SUM, 0)
        return comm.Alltoall(comm.Scatter(comm.Bcast_(z * 2, 0), 0, 3, 0), 0, 0, 3) + comm.rank

    scripted = torch.jit.script(function)
    for _ in range(3):  # the profiling executor optimises from the second time on
        x = torch.ones(3, requires_grad=True)
        with torch.profiler.profile() as profile:
            y = scripted(x, mpi4torch.COMM_WORLD)
        assert "torchrelay.mpi.Allgather" in {event.name for event in profile.events()}
        mpi.backward(y.sum())
        assert y.tolist() == [4.0] * 3 and x.grad is not None and x.grad.tolist() == [4.0] * 3
