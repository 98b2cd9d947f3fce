"""Arguments that one rank alone gets wrong: every rank raises a typed error, or stays in step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from multi.mpi.thread_transport import run_ranks
from torchrelay import mpi
from torchrelay.errors import TorchRelayError
from torchrelay.mpi import CartCommunicator, Communicator
from torchrelay.mpi._settings import changed

SIZE = 3
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that this layout is a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
WRONG: dict[str, list[Any]] = {
    "tensor": [
        None,
        [1.0],
        torch.ones(2).to_sparse(),
        torch.ones(3, 2, dtype=torch.uint16),
        torch.ones(3, 2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        NESTED,
        torch.nn.parameter.UninitializedParameter(),
    ],
    "like": [[1.0], torch.ones(3, 2, dtype=torch.uint16), torch.ones(3, 2, dtype=torch.int64)],
    "op": [None, "sum", mpi.MPI_BAND],
    "root": [None, "x", SIZE, -1],
    "axis": [None, "x", 2],
    "numelem": [None, "x", -1, 7],
    "counts": [None, 3, [1], ["x"] * SIZE],
    "color": [None, "x"],
    "dims": [None, 3, [SIZE + 1], ["x"]],
    "periods": [1, [True, True]],
    "width": [None, "x", 4, -1, [1, 1], [(1, 2, 3)], ["x"]],
    "axes": [0.5, [2], [0, 1], ["x"]],
    "peer": [None, "x", SIZE, -7],
    "tag": [None, "x", -7, 1 << 40],
}
KINDS = {
    "key": "color",
    "gatheraxis": "axis",
    "scatteraxis": "axis",
    "sendcounts": "counts",
    "dest": "peer",
    "source": "peer",
    "sendtag": "tag",
    "recvtag": "tag",
}


@dataclass
class Row:
    """A function with right arguments, and the other side of a message."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    partner: Callable[[], mpi.WaitHandle] | None = None


def rows(comm: Communicator, cart: CartCommunicator, value: float) -> dict[str, Row]:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, op = torch.full((SIZE, 2), value + comm.rank), mpi.MPI_SUM
    ones, memory = [1] * SIZE, torch.empty(SIZE, 2)
    send, receive = {"dest": above, "tag": 0}, {"source": below, "tag": 0}

    def sent() -> mpi.WaitHandle:
        return comm.Isend(x, above)

    def received() -> mpi.WaitHandle:
        return comm.Irecv(torch.empty(SIZE, 2), below)

    arguments: dict[str, dict[str, Any]] = {
        "Allreduce": {"op": op},
        "Iallreduce": {"op": op},
        "Bcast_": {"root": 0},
        "Reduce_": {"op": op, "root": 0},
        "Gather": {"gatheraxis": 0, "root": 0},
        "Gatherv": {"root": 0, "axis": 0},
        "Allgather": {"gatheraxis": 0},
        "Allgatherv": {"axis": 0},
        "Scatter": {"scatteraxis": 0, "numelem": 1, "root": 0},
        "Scatterv": {"counts": ones, "root": 0, "axis": 0},
        "Alltoall": {"gatheraxis": 0, "scatteraxis": 0, "numelem": SIZE},
        "Alltoallv": {"sendcounts": ones, "axis": 0},
        "Reduce_scatter": {"op": op, "scatteraxis": 0, "numelem": 1},
        "Reduce_scatter_block": {"op": op, "scatteraxis": 0},
        "Scan": {"op": op},
        "Exscan": {"op": op},
        "Sendrecv": {"dest": above, "source": below, "like": x, "sendtag": 0, "recvtag": 0},
    }
    found = {
        name: Row(getattr(comm, name), {"tensor": x, **others})
        for name, others in arguments.items()
    }
    found["Halo_exchange"] = Row(cart.Halo_exchange, {"tensor": x, "width": 1, "axes": [0]})
    found["Split"] = Row(comm.Split, {"color": 0, "key": 0})
    found["Cart"] = Row(comm.Cart, {"dims": [SIZE], "periods": [True]})
    found["Send"] = Row(comm.Send, {"tensor": x, **send}, received)
    found["Isend"] = Row(comm.Isend, {"tensor": x, **send}, received)
    found["Recv"] = Row(comm.Recv, {"tensor": memory, **receive}, sent)
    found["Irecv"] = Row(comm.Irecv, {"tensor": memory, **receive}, sent)
    return found


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, in a form that can be compared, or its error."""
    try:
        result = call()
        if isinstance(result, mpi.WaitHandle):
            result = result.Wait()
    except TorchRelayError as error:
        return error
    if isinstance(result, Communicator):
        return result.rank, result.size
    return result.tolist()


def outcomes(row: Row, **wrong: Any) -> list[Any]:
    """Those of a function and its partner."""
    handle = row.partner() if row.partner is not None else None
    found = [outcome(lambda: row.function(**{**row.arguments, **wrong}))]
    if handle is not None:
        found.append(outcome(handle.Wait))
    mpi.reset()
    return found


def arguments_of_all(comm: Communicator) -> dict[str, list[str]]:
    cart = comm.Cart([1], [True])
    assert cart is not None
    return {name: [*row.arguments] for name, row in rows(comm, cart, 0.0).items()}


FUNCTIONS: dict[str, list[str]] = run_ranks(1, arguments_of_all)[0]


def test_all_functions_are_here() -> None:
    # No arguments, or none that other ranks know of.
    without = {"Barrier", "Dup", "Free", "Replicate", "Wait"}
    public = {name for name in dir(CartCommunicator) if name[0].isupper()}
    assert public == {*FUNCTIONS} | without


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_arguments_of_one_rank(name: str) -> None:
    def program(comm: Communicator, argument: str = "", value: Any = None) -> list[list[Any]]:
        cart = comm.Cart([SIZE], [True])
        assert cart is not None
        wrong = {argument: value} if argument and comm.rank == SIZE - 1 else {}
        first = outcomes(rows(comm, cart, 10.0)[name], **wrong)
        return [first, outcomes(rows(comm, cart, 20.0)[name])]

    with changed(grace_s=0.01):
        right = run_ranks(SIZE, program)
        for argument in FUNCTIONS[name]:
            kind = KINDS.get(argument, argument)
            for value in WRONG[kind]:
                got = run_ranks(SIZE, lambda comm: program(comm, argument, value))  # noqa: B023
                what = (argument, value)
                for rank, rounds in enumerate(got):
                    assert isinstance(rounds, list), (what, rank, rounds)
                    if kind in ("peer", "tag"):  # it is not known which messages these were
                        continue
                    for mine, theirs in zip(rounds, right[rank], strict=True):
                        for ours, wanted in zip(mine, theirs, strict=True):
                            assert isinstance(ours, TorchRelayError) or ours == wanted, (what, rank)
                assert isinstance(got[-1][0][0], TorchRelayError), (what, got[-1])
