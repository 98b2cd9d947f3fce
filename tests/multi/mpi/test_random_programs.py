"""Programs of communications end, and agree with all ranks run in one process, in any nesting of
orders of derivatives, checkpoints, sub-communicators, transforms and non-blocking calls.

``benchmarks/soak_mpi.py`` runs more of them, also with compiled code.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable

import torch

from multi.mpi.programs import (
    SHAPE,
    TRANSFORMS,
    OneProcess,
    Program,
    Ranks,
    Statement,
    check,
    draw,
    transformed,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._chain import Chain
from waiting import eventually


@functools.cache
def ranks(comm: Communicator) -> Ranks:
    return Ranks(comm)


def check_program(comm: Communicator, program: Program) -> None:
    check(ranks(comm), OneProcess(comm.size), program)
    mpi.reset()


def collective(what: str, over: str = "world") -> Statement:
    return Statement("collective", over, (what, True), 1)


def chains() -> int:
    gc.collect()  # nothing, while another thread collects
    return sum(isinstance(each, Chain) for each in gc.get_objects())


def check_programs(comm: Communicator, seeds: Iterable[int]) -> None:
    """Check the programs of ``seeds``, of which no graph may be left."""
    ranks(comm)  # once for all tests
    mpi.reset()
    comm.Barrier()
    before = chains() if comm.rank == 0 else 0
    comm.Barrier()
    for seed in seeds:
        check_program(comm, draw(seed, compiled=False))
    comm.Barrier()
    if comm.rank == 0:
        eventually(lambda: chains() <= before)
    comm.Barrier()


@mpi_test((1, 2, 3, 5), on=THREADS, part=range(4))
def test_random_programs_end_and_agree(comm: Communicator, part: int) -> None:
    check_programs(comm, range(8 * part, 8 * part + 8))


@mpi_test((2,), on=("openmpi", "mpich", "sml"))
def test_random_programs_on_processes(comm: Communicator) -> None:
    check_programs(comm, range(32, 38))


@mpi_test((1, 2, 3), on=THREADS)
def test_sizes_of_communicators_do_not_change_the_order(comm: Communicator) -> None:
    """Of two or one ranks, before what a checkpoint recomputes."""
    for k, mode in itertools.product(range(2), ("first", "second", "third")):
        ring = Statement("ring", "world", ("", True), k)
        body = [
            collective("prod", "halves"),
            Statement("checkpoint", "world", ("", True), 0, [ring]),
            collective("sum"),
        ]
        check_program(comm, Program(3, mode, body, torch.float64, (), True))


@mpi_test((2, 3), on=THREADS)
def test_transforms_and_blocks_keep_the_order(comm: Communicator) -> None:
    """Derivatives that are reached through data on one rank, and not on another."""
    ring = Statement("ring", "first and others", ("", True), 2)
    checkpoint = Statement("checkpoint", "world", ("", True), 0, [ring])
    block = Statement("inner_force", "world", ("", True), 0, [checkpoint, collective("sum")])
    tangent = Statement(
        "transformed",
        "world",
        (("jvp",), True),
        0,
        [Statement("local", "world", ("", True), 0), collective("scan", "halves")],
    )
    ignored = Statement("collective", "world", ("sum", False), 7)
    body = [ignored, block, Statement("force", "world", ("", False), 0, [tangent])]
    check_program(comm, Program(81, "second", body, torch.float64, (), True))
    alone = Statement(
        "started",
        "first and others",
        ("", True),
        11,
        [Statement("local", "world", ("", True), 1), collective("scan", "halves")],
    )
    started = Statement("started", "alone", ("", True), 10, [alone, collective("sum", "pairs")])
    gradient = Statement("transformed", "world", (("grad",), True), 0, [started])
    check_program(comm, Program(1021, "first", [gradient], torch.float64, (), True))
    tangents = Statement("transformed", "world", (("jvp",), True), 0, [collective("sum")])
    segment = Statement("reentrant", "world", ("", True), 0, [tangents, collective("sum")])
    ignored = Statement("ring", "pairs", ("", False), 2)
    body = [collective("sum"), ignored, segment]
    check_program(comm, Program(10679, "first", body, torch.float64, (), False))


@mpi_test((2, 3), on=THREADS, names=("grad", "jvp", "vjp-grad", "vjp-vmap", "grad-jvp"))
def test_what_transforms_do_not_record_keeps_the_order(comm: Communicator, names: str) -> None:
    quiet = Statement("quiet", "alone", ("bcast", False), 2)
    ignored = Statement("collective", "world", ("sum", False), 3)
    block = Statement("inner_force", "world", ("", True), 0, [collective("sum")])
    for body in ([quiet], [collective("prod"), quiet], [quiet, collective("prod"), quiet]):
        given = (tuple(names.split("-")), True)
        inside = Statement("transformed", "world", given, 0, [*body, collective("sum")])
        for mode in ("first", "second"):
            program = Program(3, mode, [ignored, block, inside], torch.float64, (), True)
            check_program(comm, program)


@mpi_test((2, 3), on=THREADS)
def test_segments_are_recomputed_alike(comm: Communicator) -> None:
    """Where only some ranks save tensors after a segment, in another one, communicates."""

    def checkpointed(*body: Statement) -> Statement:
        return Statement("checkpoint", "world", ("", True), 0, [*body])

    local = [Statement("local", "world", ("", True), k) for k in range(4)]
    batched = Statement("transformed", "world", (("vmap",), True), 0, [collective("sum")])
    for k, inside in itertools.product(range(4), (collective("prod"), batched, local[0])):
        force = Statement("inner_force", "world", ("", True), 0, [inside, collective("sum")])
        for body in (
            [checkpointed(checkpointed(inside, local[k - 1]), local[k])],
            [checkpointed(checkpointed(checkpointed(inside), local[k]), local[k])],
            [checkpointed(collective("sum"), checkpointed(local[k], force), local[k])],
        ):
            check_program(comm, Program(k, "second", body, torch.float64, (), True))


PAIRS = ["-".join(pair) for pair in itertools.product((*TRANSFORMS, "jacrev", "jacfwd"), repeat=2)]


@mpi_test((1, 2, 3), on=THREADS, pair=PAIRS)
def test_pairs_of_transforms(comm: Communicator, pair: str) -> None:
    names = tuple(pair.split("-"))
    for body in (
        [collective("sum")],
        [collective("prod"), Statement("local", "world", ("", True), 1), collective("shift")],
    ):
        check_program(comm, Program(5, "transformed", body, torch.float64, names, False))
    function, x = ranks(comm).function(body), torch.ones(2, requires_grad=True)
    y = comm.Allreduce(x, mpi.MPI_SUM)
    with torch.no_grad():  # which records nothing that the backward pass must reach
        transformed(function, names, comm, torch.float64)(torch.ones(SHAPE).double())
    y.sum().backward()
