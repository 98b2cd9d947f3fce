"""The order of communications: kept backward without help, and checked where it cannot be."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grads import grad_of
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError, GraphError, MismatchError
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed

SIZES = (1, 2, 3)


def leaf(value: float, size: int = 4) -> Tensor:
    return torch.full((size,), float(value), dtype=torch.float64, requires_grad=True)


@mpi_test((1, 2, 3, 5))
def test_ring_without_dummies(comm: Communicator) -> None:
    """The first example of the original's document, with the naive code that its text warns of."""
    sendbuffer, recvbuffer = leaf(comm.rank + 1), torch.empty(4, dtype=torch.float64)
    handle = comm.Isend(sendbuffer, (comm.rank + 1) % comm.size, 0)
    comm.Recv(recvbuffer, (comm.rank - 1) % comm.size, 0)
    comm.Wait(handle)
    assert recvbuffer[0] == (comm.rank - 1) % comm.size + 1
    (recvbuffer * (comm.rank + 1)).sum().backward()
    assert grad_of(sendbuffer).tolist() == [(comm.rank + 1) % comm.size + 1.0] * 4


@mpi_test((1, 2, 3, 5))
def test_ring_with_dummies(comm: Communicator) -> None:
    sendbuffer, recvbuffer = leaf(comm.rank + 1), torch.empty(4, dtype=torch.float64)
    handle = comm.Isend(sendbuffer, (comm.rank + 1) % comm.size, 0)
    res1 = comm.Recv(mpi.JoinDummies(recvbuffer, [handle.dummy]), (comm.rank - 1) % comm.size, 0)
    res2 = comm.Wait(mpi.JoinDummiesHandle(handle, [res1]))
    (mpi.JoinDummies(res1, [res2]) * (comm.rank + 1)).sum().backward()
    assert grad_of(sendbuffer).tolist() == [(comm.rank + 1) % comm.size + 1.0] * 4


@mpi_test(SIZES)
def test_join_dummies_gives_zeros_to_dummies(comm: Communicator) -> None:
    x, dummy = leaf(1), leaf(2, 3)
    grads = torch.autograd.grad(mpi.JoinDummies(x, [dummy]).sum(), [x, dummy])
    assert grads[0].tolist() == [1.0] * 4 and grads[1].tolist() == [0.0] * 3


@mpi_test((1, 2, 3, 5))
def test_data_parallel_lbfgs_gives_the_parameters_of_one_process(comm: Communicator) -> None:
    """The second example of the original's document."""
    generator = torch.Generator().manual_seed(0)
    xinput = 2 * torch.rand(60, generator=generator, dtype=torch.float64)
    youtput = 1.5 * torch.exp(-0.7 * xinput) + 0.3
    mine = slice(comm.rank * 60 // comm.size, (comm.rank + 1) * 60 // comm.size)

    def fit(reduce: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, size: int) -> Tensor:
        params = torch.ones(3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [params],
            max_iter=300,
            max_eval=600,
            tolerance_grad=1e-14,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            p = reduce(params) / reduce(torch.ones((), dtype=torch.float64)).detach()
            value = reduce((y - p[0] * torch.exp(-p[1] * x) - p[2]).square().sum()) / size
            value.backward()
            return value * size

        optimizer.step(loss)
        return params.detach()

    ours = fit(lambda t: comm.Allreduce(t, mpi.MPI_SUM), xinput[mine], youtput[mine], comm.size)
    alone = fit(lambda t: t, xinput, youtput, 1)
    assert torch.allclose(ours, alone, rtol=0, atol=1e-12), (ours - alone).abs().max()


@mpi_test((2, 3))
def test_trailing_send_with_the_loss_on_one_rank(comm: Communicator) -> None:
    x = leaf(comm.rank)
    if comm.rank == 0:
        comm.Send(x, 1)
        mpi.backward()
        assert grad_of(x).tolist() == [2.0] * 4
    elif comm.rank == 1:
        (2 * comm.Recv(torch.empty_like(x), 0)).sum().backward()


@mpi_test((2, 3))
def test_requires_grad_on_one_rank_only(comm: Communicator) -> None:
    x = leaf(1) if comm.rank == 0 else torch.ones(4, dtype=torch.float64)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    assert y.requires_grad
    y.sum().backward()
    assert comm.rank or grad_of(x).tolist() == [float(comm.size)] * 4


@mpi_test((2, 3))
def test_rank_that_ignores_a_result(comm: Communicator) -> None:
    x = leaf(1)
    first, second = comm.Allreduce(x, mpi.MPI_SUM), comm.Allreduce(2 * x, mpi.MPI_SUM)
    used = first + second if comm.rank == 0 else second
    used.sum().backward()
    assert grad_of(x).tolist() == [1.0 + 2 * comm.size] * 4


@mpi_test((2, 3))
def test_sends_that_relied_on_buffers_end_backward(comm: Communicator) -> None:
    x = leaf(comm.rank)
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Send(x, above)
    y = comm.Recv(torch.empty_like(x), below)
    comm.Send(y * 2, above)
    z = comm.Recv(torch.empty_like(x), below)
    (z * (comm.rank + 1)).sum().backward()
    assert grad_of(x).tolist() == [2.0 * ((comm.rank + 2) % comm.size + 1)] * 4


@mpi_test((2, 3))
def test_wildcard_receive_answers_its_sender(comm: Communicator) -> None:
    x = leaf(comm.rank)
    if comm.rank == 0:
        for _ in range(comm.size - 1):
            got = comm.Recv(torch.empty_like(x), mpi.MPI_ANY_SOURCE, mpi.MPI_ANY_TAG)
            (got * got.detach()).sum().backward()
    else:
        comm.Send(x, 0, tag=comm.rank)
        mpi.backward()
        assert grad_of(x).tolist() == [float(comm.rank)] * 4


@mpi_test(SIZES)
def test_communications_of_two_communicators_keep_one_order(comm: Communicator) -> None:
    other, half = comm.Dup(), comm.Split(comm.rank % 2, comm.rank)
    assert half is not None
    x = leaf(comm.rank + 1)
    y = half.Allreduce(other.Allreduce(x, mpi.MPI_SUM), mpi.MPI_SUM)
    other.Allreduce(y, mpi.MPI_SUM).sum().backward()
    groups = [sum(1 for r in range(comm.size) if r % 2 == s % 2) for s in range(comm.size)]
    assert grad_of(x).tolist() == [float(comm.size * sum(g for g in groups))] * 4
    assert comm.Split(mpi.MPI_UNDEFINED if comm.rank else 0) is None or comm.rank == 0


@mpi_test((2, 3))
def test_a_communicator_of_one_rank_keeps_the_order_of_the_others(comm: Communicator) -> None:
    me, unequal = comm.Split(comm.rank), comm.Split(comm.rank // 2)
    assert me is not None and unequal is not None
    x, w = leaf(1), leaf(2)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    with mpi.chain():
        me.Allreduce(w, mpi.MPI_SUM).sum().backward()
    mpi.backward(y.sum() if comm.rank == 0 else None)
    assert grad_of(x).tolist() == [1.0] * 4
    for part in (me, unequal):
        x.grad = None
        y = comm.Allreduce(x, mpi.MPI_SUM)
        part.Allreduce(w, mpi.MPI_SUM).sum().backward()  # runs that of y, with zeros
        with pytest.raises(GraphError, match="a second backward pass reaches Allreduce"):
            y.sum().backward()
        assert grad_of(x).tolist() == [0.0] * 4
        y = comm.Allreduce(x, mpi.MPI_SUM) + part.Allreduce(w, mpi.MPI_SUM)
        comm.Allgather(x, 0)
        with pytest.raises(GraphError, match=r"does not reach .* \(Allgather\)"):
            y.sum().backward()
        mpi.reset()


@mpi_test((1,))
def test_one_process_may_differentiate_its_communications_in_any_order(
    comm: Communicator,
) -> None:
    x = leaf(1)
    first, second = comm.Allreduce(x, mpi.MPI_SUM), comm.Allgather(2 * x, 0)
    last = comm.Iallreduce(3 * x, mpi.MPI_SUM).Wait()
    for y in (second, first, last):
        y.sum().backward()
    assert grad_of(x).tolist() == [6.0] * 4


@mpi_test(SIZES)
def test_checkpointing_runs_communications_again(comm: Communicator) -> None:
    for use_reentrant in (False, True):
        x = leaf(comm.rank + 1)
        body = lambda t: comm.Allreduce(t.sin(), mpi.MPI_SUM).cos() * t  # noqa: E731
        body(x).sum().backward()
        wanted, x.grad = grad_of(x), None
        checkpoint(body, x, use_reentrant=use_reentrant).sum().backward()
        assert torch.allclose(grad_of(x), wanted)


@mpi_test(SIZES)
def test_graph_is_let_go_after_each_backward(comm: Communicator) -> None:
    kept = None
    for _ in range(3):
        x = leaf(1)
        y = comm.Allreduce(x * 2, mpi.MPI_SUM)
        y.sum().backward()
        if kept is not None:
            assert kept() is None
        kept = weakref.ref(y.grad_fn)
        del y


@mpi_test(SIZES)
def test_cotangent_of_a_started_collective_is_let_go(comm: Communicator) -> None:
    kept = []
    gc.collect()
    gc.disable()  # not by the collector of cycles
    try:
        y = comm.Iallreduce(leaf(1), mpi.MPI_SUM).Wait()
        y.register_hook(lambda grad: kept.append(weakref.ref(grad)))
        (y * y).sum().backward()
        assert kept[0]() is None
    finally:
        gc.enable()


@mpi_test(SIZES)
def test_retain_graph_runs_again(comm: Communicator) -> None:
    x = leaf(1)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert grad_of(x).tolist() == [2.0 * comm.size] * 4


@mpi_test(SIZES)
def test_second_backward_through_a_shared_communication_raises(comm: Communicator) -> None:
    for convention in ("sum", "replicated"):
        chosen = comm.replace(convention=convention)
        for function in (
            lambda t: chosen.Allreduce(t, mpi.MPI_SUM),  # noqa: B023
            lambda t: chosen.Iallreduce(t, mpi.MPI_SUM).Wait(),  # noqa: B023
            lambda t: chosen.Bcast_(t * 1, 0),  # noqa: B023
        ):
            x = leaf(1)
            y = function(x * 2)
            y.sum().backward()
            with pytest.raises(GraphError, match="retain_graph=True"):
                (3 * y).sum().backward()
    x = leaf(1)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    with mpi.chain():  # a pass that ran y's backward, but not as a part of y's chain
        comm.Allreduce(y, mpi.MPI_SUM).sum().backward()
    comm.Allreduce(x, mpi.MPI_SUM).sum().backward()
    assert grad_of(x).tolist() == [float(comm.size**2 + comm.size)] * 4


@mpi_test((2, 3))
def test_unreachable_communications_are_named(comm: Communicator) -> None:
    x = leaf(1)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    comm.Allgather(x, 0)
    with pytest.raises(GraphError, match="Allgather"):
        y.sum().backward()
    mpi.backward(y.sum())
    first, y = comm.Allgather(x.detach(), 0), comm.Allreduce(x, mpi.MPI_SUM)
    with pytest.raises(GraphError, match="Allgather"):
        torch.autograd.grad(y.sum(), x)
    (g,) = mpi.grad(y.sum(), x)
    assert g.tolist() == [float(comm.size)] * 4
    with changed(unreachable_policy="warn"):
        y = comm.Allreduce(x, mpi.MPI_SUM)
        comm.Bcast_(x * 1, 0)
        with pytest.warns(UserWarning, match="Bcast"):
            y.sum().backward()
    assert first.shape == (4 * comm.size,)


@mpi_test((2, 3))
def test_communication_that_raised_is_not_reached_for(comm: Communicator) -> None:
    x = leaf(1)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    with pytest.raises(MismatchError):
        comm.Allgather(torch.ones(2, 2 + comm.rank), 0)
    y.sum().backward()
    assert grad_of(x).tolist() == [float(comm.size)] * 4


@mpi_test((2, 3))
def test_long_chains_warn_once(comm: Communicator) -> None:
    x = leaf(1)
    with changed(chain_warning=2):
        comm.Allreduce(x, mpi.MPI_SUM)
        comm.Allreduce(x, mpi.MPI_SUM)
        with pytest.warns(UserWarning, match="without a backward pass"):
            comm.Allreduce(x, mpi.MPI_SUM)
        comm.Allreduce(x, mpi.MPI_SUM)


@mpi_test((2, 3))
def test_overwritten_leaf_must_not_be_used_otherwise(comm: Communicator) -> None:
    x = leaf(comm.rank + 1)
    result = comm.Reduce_(x, mpi.MPI_SUM, 0)
    result.sum().backward()
    assert grad_of(x).tolist() == [1.0] * 4
    result = comm.Reduce_(x, mpi.MPI_SUM, 0)
    with pytest.raises(RuntimeError, match="overwritten"):
        (result + x).sum().backward()


@mpi_test(SIZES)
def test_in_place_on_a_tensor_with_history_becomes_the_result(comm: Communicator) -> None:
    x = leaf(comm.rank + 1)
    t = x * 3
    assert comm.Bcast_(t, 0) is t
    t.sum().backward()
    assert grad_of(x).tolist() == [3.0 * comm.size * (comm.rank == 0)] * 4
    view = (x * 2)[:2]
    comm.Reduce_(view, mpi.MPI_SUM, 0)
    assert view.tolist() == [(comm.rank == 0) * comm.size * (comm.size + 1.0)] * 2
    saved = x * 1
    loss = saved.sin().sum()
    comm.Bcast_(saved, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        mpi.backward(loss)


@mpi_test(SIZES)
def test_conventions(comm: Communicator) -> None:
    """One loss, held alike by all ranks: as the sum of all ranks' losses, and as one replicated
    loss.
    """
    x = leaf(1)
    comm.Allreduce(x, mpi.MPI_SUM).sum().backward()
    assert grad_of(x).tolist() == [float(comm.size)] * 4
    replicated = comm.replace(convention="replicated")
    for function in (
        lambda t: replicated.Allreduce(t, mpi.MPI_SUM).sum(),
        lambda t: replicated.Allgather(t, 0).sum(),
        lambda t: (
            replicated.Allreduce((replicated.Replicate(t) * (comm.rank + 1)).sum(), mpi.MPI_SUM)
            * 2
            / (comm.size * (comm.size + 1))
        ),
        lambda t: (
            replicated.Allreduce(replicated.Bcast_(t * 1, 0), mpi.MPI_MAX).sum()
            if comm.size == 1
            else t.sum()
        ),
    ):
        (grad,) = torch.autograd.grad(function(x), x)
        assert torch.allclose(grad, torch.ones_like(x))
    with pytest.raises(ArgumentError):
        comm.replace(convention="mean")


@mpi_test(SIZES)
def test_world_can_be_pickled(comm: Communicator) -> None:
    assert pickle.loads(pickle.dumps(comm)) is comm
    with pytest.raises(ArgumentError, match="COMM_WORLD"):
        pickle.dumps(comm.Dup())


@mpi_test((2, 3))
def test_debug_mode_names_both_calls_on_all_ranks(comm: Communicator) -> None:
    with changed(debug=True):
        comm.Allreduce(torch.ones(2), mpi.MPI_SUM)
        with pytest.raises(MismatchError, match=r"(?s)float32 \(2,\).*float64 \(3,\)"):
            comm.Allreduce(
                torch.ones(2) if comm.rank == 0 else torch.ones(3, dtype=torch.float64), mpi.MPI_SUM
            )
        with (
            torch.set_grad_enabled(comm.rank == 0),
            pytest.raises(MismatchError, match="not recorded"),
        ):
            comm.Allreduce(torch.ones(2), mpi.MPI_SUM)
    with pytest.raises(MismatchError, match="rank 1"):
        comm.Allgather(torch.ones(2, 2 if comm.rank != 1 else 3), 0)


@mpi_test((2, 3))
def test_debug_mode_lets_a_started_collective_wait_for_messages(comm: Communicator) -> None:
    with changed(debug=True, timeout_s=60.0):
        x = leaf(comm.rank + 1)
        if comm.rank == 0:
            handle = comm.Iallreduce(x, mpi.MPI_SUM)
            comm.Send(x, 1)
        else:
            if comm.rank == 1:
                assert comm.Recv(torch.empty(4).double(), 0).tolist() == [1.0] * 4
            handle = comm.Iallreduce(x, mpi.MPI_SUM)
        comm.Wait(handle).sum().backward()
        assert grad_of(x).tolist() == [float(comm.size)] * 4


@mpi_test((1, 2, 3))
def test_receives_waited_for_in_another_order_answer_their_own_senders(
    comm: Communicator,
) -> None:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    xs = [leaf(10 * comm.rank + number) for number in range(3)]
    receiving = [comm.Irecv(torch.empty_like(x), below) for x in xs]
    sending = [comm.Isend(x, above) for x in xs]
    got = {number: comm.Wait(receiving[number]) for number in (1, 2, 0)}
    for handle in sending:
        comm.Wait(handle)
    for _ in range(2):
        total = torch.stack([(number + 1) * got[number] for number in range(3)]).sum()
        total.backward(retain_graph=True)
    assert [grad_of(x).tolist() for x in xs] == [[2.0 * (number + 1)] * 4 for number in range(3)]
    mpi.reset()


@mpi_test((1, 2, 3))
def test_debug_mode_lets_messages_that_fit_through(comm: Communicator) -> None:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with changed(debug=True):
        x = leaf(comm.rank + 1)
        first, second = (
            comm.Irecv(torch.empty(2), below, 1),
            comm.Irecv(torch.empty(4).double(), below, 1),
        )
        for t in (torch.ones(2), x):
            comm.Wait(comm.Isend(t, above, 1))
        y = comm.Wait(second)  # waited for in another order than sent
        assert comm.Wait(first).tolist() == [1.0, 1.0]
        handle = comm.Isend(y, above, 2)
        z = comm.Recv(torch.empty_like(y), mpi.MPI_ANY_SOURCE, mpi.MPI_ANY_TAG)
        comm.Wait(handle)
        comm.Sendrecv(z, above, below).sum().backward()
        assert grad_of(x).tolist() == [1.0] * 4
