"""Random programs of communications, and what they must give.

A program is drawn from a seed, so every rank draws the same one. It is run twice: by the ranks, and
in one process by plain torch on all ranks' tensors. A tensor goes through the statements of its
body, which may hold bodies: a checkpointed segment, a function that is transformed, or what
happens while a collective is in progress. Afterwards the program is differentiated.

Ranks ignore results, and exchange messages between two of them. What a plain backward pass starts
at, as those of reentrant checkpoints and of ``torch.func`` do, ends with a *strict* communication,
whose result all ranks use.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from multi.mpi.reference import inputs
from torchrelay import mpi
from torchrelay.mpi import Communicator

SHAPE = (3, 2)
Function = Callable[[Tensor], Tensor]
Functions = Callable[[list[Tensor]], list[Tensor]]  # of all ranks' tensors

COLORS: dict[str, Callable[[int], int]] = {
    "world": lambda rank: 0,
    "halves": lambda rank: rank % 2,
    "first and others": lambda rank: min(rank, 1),
    "pairs": lambda rank: rank // 2,
    "alone": lambda rank: rank,
}
COLLECTIVES = (
    "sum",
    "prod",
    "max",
    "bcast",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "scan",
    "exscan",
    "alltoall",
    "reduce_scatter",
    "shift",
)
TRANSFORMS = ("grad", "vjp", "jvp", "vmap")
FLAT = ("collective", "local", "quiet", "ring", "crossed", "message", "compiled")
NESTED = ("checkpoint", "reentrant", "transformed", "force", "inner_force", "started")
IN_PLACE = ("bcast", "reduce")
MODES = ("first", "plain", "second", "second closed", "third", "dual", "transformed")


@dataclass
class Statement:
    """One step, of a kind above.

    Attributes:
        over: the communicator, of ``COLORS``.
        what: the collective, the transforms, or nothing.
        k: varies it.
        body: of a nested kind.
    """

    kind: str
    over: str
    what: Any
    k: int
    body: list[Statement] = field(default_factory=list)


@dataclass
class Program:
    """A body, and how it is differentiated."""

    seed: int
    mode: str
    body: list[Statement]
    dtype: torch.dtype
    transforms: tuple[str, ...]
    in_chain: bool


def draw(seed: int, modes: Sequence[str] = MODES, compiled: bool = True) -> Program:
    """Draw a program."""
    rng = random.Random(seed)
    mode, transforms = rng.choice(modes), _transforms(rng)
    is_complex = mode in ("first", "second") and rng.random() < 0.2
    names = [each for each in COLLECTIVES if not (is_complex and each == "max")]
    kinds = {*FLAT, *NESTED}
    if mode == "transformed":
        kinds = {"collective", "local", "quiet", "started"}
    elif mode == "dual":
        kinds = {*FLAT, "started", "checkpoint"}
    if mode == "transformed" and not _can_copy(transforms):
        names = [each for each in names if each not in IN_PLACE]
    once = {"compiled", "reentrant"}  # what torch differentiates once
    if mode not in ("first", "plain") or rng.random() < 0.5:
        kinds -= once
    else:
        kinds -= {"force"}
    if not compiled:
        kinds -= {"compiled"}

    def body(depth: int, kinds: set[str], names: list[str]) -> list[Statement]:
        return [statement(depth, kinds, names) for _ in range(rng.randint(1, max(1, 4 - depth)))]

    def statement(depth: int, kinds: set[str], names: list[str]) -> Statement:
        nested = sorted(kinds & {*NESTED}) if depth < 3 else []
        kind = rng.choice(
            nested if nested and rng.random() < 0.5 else ["collective", *sorted(kinds & {*FLAT})]
        )
        what, k, over = rng.choice(names), rng.randint(0, 11), rng.choice([*COLORS])
        if kind not in NESTED:
            return Statement(kind, over, (what, False), k)
        given: Any = what
        if kind == "transformed":
            # saved tensors of a checkpoint have hooks, which torch.func lacks in reverse mode
            given = _transforms(rng, TRANSFORMS if "force" in kinds else ("jvp", "vmap"))
            kinds = {"collective", "local", "quiet", "started"}
            if not _can_copy(given):
                names = [each for each in names if each not in IN_PLACE]
        elif kind in ("reentrant", "force", "inner_force"):
            kinds = kinds - once
        if kind == "checkpoint":
            kinds = kinds - {"force"}  # nothing before a segment is recomputed
        inside = body(depth + 1, kinds, names)
        if kind in ("reentrant", "transformed", "inner_force"):
            inside.append(used(k))
        if kind == "inner_force" and mode == "second closed":
            inside.insert(0, used(k))
        return Statement(kind, over, (given, False), k, inside)

    def used(k: int) -> Statement:
        return Statement("collective", "world", ("sum", True), k)

    statements = body(0, kinds, names)
    if mode in ("plain", "second closed", "transformed"):
        statements = [used(1), *statements, used(2)]
    dtype = torch.complex128 if is_complex else torch.float64
    return Program(seed, mode, statements, dtype, transforms, rng.random() < 0.5)


def _can_copy(transforms: tuple[str, ...]) -> bool:
    """Return whether torch can copy into a tensor: not within ``vmap``, if second tangents may be
    zero (``ZeroTensors are immutable``).
    """
    return not ("vmap" in transforms and transforms.count("jvp") > 1)


def _transforms(rng: random.Random, names: Sequence[str] = TRANSFORMS) -> tuple[str, ...]:
    return tuple(rng.choice(names) for _ in range(rng.choice((1, 1, 2, 2, 3))))


def calm(x: Tensor) -> Tensor:
    """A function of all elements whose values stay small."""
    return x / (1 + 0.1 * (x * x.conj()).real.sum())


def local(x: Tensor, k: int, rank: int) -> Tensor:
    """Operations that differ between ranks."""
    kind = (k + rank) % 4
    if kind == 0:
        return x
    if kind == 1:
        return calm(x.sin())
    return x * (0.5 + 0.1 * rank) if kind == 2 else calm(calm(x.sinh()))


def is_ignored(strict: bool, k: int, rank: int) -> bool:
    return not strict and (7 * rank + k) % 3 == 0


def weights(seed: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return inputs([SHAPE] * size, dtype, seed)


def dot(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum().real


# The ranks


class Ranks:
    """Runs programs on the ranks of a communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        parts = {name: comm.Split(color(comm.rank), comm.rank) for name, color in COLORS.items()}
        self.comms = {name: part for name, part in parts.items() if part is not None}
        self._compiled: dict[int, Function] = {}

    def function(self, body: list[Statement]) -> Function:
        def run(x: Tensor) -> Tensor:
            for each in body:
                x = getattr(self, each.kind)(each, x)
            return x

        return run

    def local(self, s: Statement, x: Tensor) -> Tensor:
        return local(x, s.k, self.comm.rank)

    def collective(self, s: Statement, x: Tensor) -> Tensor:
        what, strict = s.what
        y = call(self.comms[s.over], what, s.k, x)
        return x if is_ignored(strict, s.k, self.comm.rank) else calm(y + 0.3 * x)

    def quiet(self, s: Statement, x: Tensor) -> Tensor:
        """What autograd does not record."""
        with torch.no_grad():
            y = call(self.comms[s.over], s.what[0], s.k, x.detach())
        return calm(x + 0.2 * y.detach())

    def ring(self, s: Statement, x: Tensor) -> Tensor:
        c = self.comms[s.over]
        sent = c.Isend(x, (c.rank + 1) % c.size, 5)
        got = c.Irecv(torch.empty_like(x), (c.rank - 1) % c.size, 5)
        if (self.comm.rank + s.k) % 2:
            y = c.Wait(got)
            c.Wait(sent)
        else:
            c.Wait(sent)
            y = c.Wait(got)
        return x if is_ignored(s.what[1], s.k, self.comm.rank) else calm(y + 0.5 * x)

    def crossed(self, s: Statement, x: Tensor) -> Tensor:
        """Two receives, and two reductions, waited for in orders that differ."""
        c = self.comms[s.over]
        above, below = (c.rank + 1) % c.size, (c.rank - 1) % c.size
        got = [c.Irecv(torch.empty_like(x), below) for _ in range(2)]
        started = [c.Iallreduce(x, mpi.MPI_SUM), c.Iallreduce(calm(x), mpi.MPI_SUM)]
        sent = [c.Isend(t, above) for t in (x, 2 * x)]
        order = (0, 1) if (self.comm.rank + s.k) % 2 else (1, 0)
        first = {i: c.Wait(started[i]) for i in order}
        second = {i: c.Wait(got[i]) for i in order}
        for handle in sent:
            handle.Wait()
        return calm(first[0] * second[1] + 0.5 * first[1] + second[0])

    def message(self, s: Statement, x: Tensor) -> Tensor:
        c = self.comms[s.over]
        a, b = s.k % c.size, (s.k + 1) % c.size
        if a != b and c.rank == a:
            c.Send(x, b, 3)
        if a != b and c.rank == b:
            source = mpi.MPI_ANY_SOURCE if s.k % 5 == 0 else a
            x = calm(x + c.Recv(torch.empty_like(x), source, 3))
        return x

    def compiled(self, s: Statement, x: Tensor) -> Tensor:
        k = s.k % 3 + 3 * x.is_complex()
        if k not in self._compiled:
            compile: Any = torch.compile
            self._compiled[k] = compile(partial(compilable, self.comm, k % 3), backend="aot_eager")
        return self._compiled[k](x)

    def checkpoint(self, s: Statement, x: Tensor) -> Tensor:
        return checkpoint(self.function(s.body), x, use_reentrant=False)

    def reentrant(self, s: Statement, x: Tensor) -> Tensor:
        return checkpoint(self.function(s.body), x, use_reentrant=True)

    def started(self, s: Statement, x: Tensor) -> Tensor:
        c, op = self.comms[s.over], (mpi.MPI_SUM, mpi.MPI_SUM, mpi.MPI_PROD)[s.k % 3]
        handle = c.Iallreduce(x * 1, op)
        y = self.function(s.body)(x)
        return calm(handle.Wait() + y)

    def force(self, s: Statement, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # the reference's value needs the derivative
            with torch.enable_grad(), mpi.chain():
                x = x.detach().requires_grad_()
                return self.force(s, x).detach()
        x = x * 1  # what earlier communications do not depend on
        (g,) = mpi.grad(self.function(s.body)(x).real.sum(), x, create_graph=True)
        return calm(x + g)

    def inner_force(self, s: Statement, x: Tensor) -> Tensor:
        with mpi.chain():
            return self.force(s, x)

    def transformed(self, s: Statement, x: Tensor) -> Tensor:
        function, strict = self.function(s.body), s.what[0]
        return calm(x + transformed(function, strict, self.comm, x.dtype)(x))


def compilable(c: Communicator, k: int, x: Tensor) -> Tensor:
    if k == 0:
        return calm(c.Allreduce(x.sin(), mpi.MPI_SUM) + x)
    if k == 1:
        y = c.Sendrecv(x, (c.rank + 1) % c.size, (c.rank - 1) % c.size)
        return calm(c.Allreduce(calm(y), mpi.MPI_SUM) * y + x)
    return calm(c.Scan(x.sin(), mpi.MPI_SUM) + c.Allgather(x, 0).view(c.size, *SHAPE).sum(0))


def call(  # noqa: PLR0911 - a function each
    c: Communicator, what: str, k: int, x: Tensor
) -> Tensor:
    """Call a function whose result has the shape of ``x``."""
    n, r, root = c.size, c.rank, k % c.size
    if what in ("sum", "prod", "max"):
        op = {"sum": mpi.MPI_SUM, "prod": mpi.MPI_PROD, "max": mpi.MPI_MAX}[what]
        total: Tensor = c.Allreduce(x, op)
        return total
    if what == "bcast":
        return c.Bcast_(x * 1, root)
    if what == "reduce":
        return c.Reduce_(x * 1, mpi.MPI_SUM, root)
    if what == "allgather":
        return weighted(c.Allgather(x, 0).view(n, *SHAPE))
    if what == "gather":
        y = c.Gather(x, 0, root)
        return weighted(y.view(n, *SHAPE)) if r == root else y.sum().expand(SHAPE)
    if what == "scatter":
        return c.Scatter(torch.cat([x * (i + 1) for i in range(n)]), 0, SHAPE[0], root)
    if what in ("scan", "exscan"):
        return (c.Scan if what == "scan" else c.Exscan)(x, mpi.MPI_SUM)
    if what == "alltoall":
        whole = torch.cat([x * (i + 1 + r) for i in range(n)], 1)
        return c.Alltoall(whole, 0, 1, SHAPE[1]).view(n, *SHAPE).sum(0)
    if what == "reduce_scatter":
        whole = torch.cat([x * (i + 1) for i in range(n)])
        return c.Reduce_scatter(whole, mpi.MPI_SUM, 0, SHAPE[0])
    return c.Sendrecv(x, (r + k) % n, (r - k) % n)


def weighted(rows: Tensor) -> Tensor:
    return torch.stack([(i + 1) * row for i, row in enumerate(rows.unbind())]).sum(0)


def transformed(
    function: Function, names: tuple[str, ...], comm: Communicator, dtype: torch.dtype
) -> Function:
    """Transform ``function``, by the first of ``names`` first."""
    for i, name in enumerate(names):
        w = weights(100 + i, comm.size, dtype)[comm.rank]
        function = partial(_transform, name, function, w)
    return function


def _transform(name: str, function: Function, w: Tensor, x: Tensor) -> Tensor:
    result: Any
    if name == "grad":
        result = torch.func.grad(lambda t: dot(function(t), w))(x)
    elif name == "vjp":
        result = torch.func.vjp(function, x)[1](w)[0]
    elif name == "jvp":
        result = torch.func.jvp(function, (x,), (w,))[1]
    elif name == "jacrev":  # of the sum of all ranks' elements of one index
        result = torch.einsum("ij,ijkl->kl", w, torch.func.jacrev(function)(x))
    elif name == "jacfwd":  # all ranks' elements of one index vary
        result = torch.einsum("ijkl,kl->ij", torch.func.jacfwd(function)(x), w)
    else:
        result = torch.vmap(function)(torch.stack([x, 0.5 * x])).sum(0)
    return result


# All ranks in one process


class OneProcess:
    """Runs programs on all ranks' tensors, each once for all ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._last: tuple[Program, list[list[Tensor]]] | None = None

    def wanted(self, program: Program, xs: list[Tensor], ws: list[Tensor]) -> list[list[Tensor]]:
        """Return the results of ``program`` for all ranks."""
        with self._lock:
            if self._last is None or self._last[0] != program:
                self._last = (program, _wanted(self, program, xs, ws))
            return self._last[1]

    def errors(self, program: Program, xs: list[Tensor], ws: list[Tensor]) -> list[float]:
        """Return how much each result of ``program`` may differ by rounding: ten times as much as
        inputs do that differ in their last bits.
        """
        wanted, noise = self.wanted(program, xs, ws), inputs([SHAPE] * self.size, torch.float64, 0)
        near = [x * (1 + 1e-15 * each) for x, each in zip(xs, noise, strict=True)]
        with self._lock:
            found = _wanted(self, program, near, ws)
        return [
            10 * max(float((x - y).abs().max()) for x, y in zip(*each, strict=True))
            for each in zip(wanted, found, strict=True)
        ]

    def function(self, body: list[Statement]) -> Functions:
        def run(xs: list[Tensor]) -> list[Tensor]:
            for each in body:
                xs = getattr(self, each.kind)(each, xs)
            return xs

        return run

    def by_group(self, over: str, function: Functions, xs: list[Tensor]) -> list[Tensor]:
        ys, color = list(xs), COLORS[over]
        for each in {color(r): None for r in range(self.size)}:
            members = [r for r in range(self.size) if color(r) == each]
            for r, y in zip(members, function([xs[r] for r in members]), strict=True):
                ys[r] = y
        return ys

    def local(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        return [local(x, s.k, r) for r, x in enumerate(xs)]

    def collective(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        ys = self.by_group(s.over, partial(model, s.what[0], s.k), xs)
        return [
            x if is_ignored(s.what[1], s.k, r) else calm(y + 0.3 * x)
            for r, (x, y) in enumerate(zip(xs, ys, strict=True))
        ]

    def quiet(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            ys = self.by_group(s.over, partial(model, s.what[0], s.k), [x.detach() for x in xs])
        return [calm(x + 0.2 * y.detach()) for x, y in zip(xs, ys, strict=True)]

    def ring(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        ys = self.by_group(s.over, lambda g: [g[-1], *g[:-1]], xs)
        return [
            x if is_ignored(s.what[1], s.k, r) else calm(y + 0.5 * x)
            for r, (x, y) in enumerate(zip(xs, ys, strict=True))
        ]

    def crossed(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        def group(g: list[Tensor]) -> list[Tensor]:
            first, second = sum(g), sum(map(calm, g))
            return [calm(first * (2 * g[r - 1]) + 0.5 * second + g[r - 1]) for r in range(len(g))]

        return self.by_group(s.over, group, xs)

    def message(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        def group(g: list[Tensor]) -> list[Tensor]:
            a, b = s.k % len(g), (s.k + 1) % len(g)
            return [calm(x + g[a]) if a != b and r == b else x for r, x in enumerate(g)]

        return self.by_group(s.over, group, xs)

    def compiled(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        if s.k % 3 == 0:
            return [calm(sum(t.sin() for t in xs) + x) for x in xs]
        if s.k % 3 == 1:
            ys = [xs[r - 1] for r in range(len(xs))]
            return [calm(sum(map(calm, ys)) * y + x) for x, y in zip(xs, ys, strict=True)]
        return [calm(sum(t.sin() for t in xs[: r + 1]) + sum(xs)) for r in range(len(xs))]  # type: ignore[arg-type]

    def checkpoint(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        return self.function(s.body)(xs)

    reentrant = checkpoint

    def started(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        what = ("sum", "sum", "prod")[s.k % 3]
        total = self.by_group(s.over, partial(model, what, 0), xs)
        ys = self.function(s.body)(xs)
        return [calm(t + y) for t, y in zip(total, ys, strict=True)]

    def force(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        function = self.function(s.body)
        gs: Any = torch.func.grad(lambda ts: sum(y.real.sum() for y in function(ts)))(xs)
        return [calm(x + g) for x, g in zip(xs, gs, strict=True)]

    inner_force = force

    def transformed(self, s: Statement, xs: list[Tensor]) -> list[Tensor]:
        ys = self.transform(self.function(s.body), s.what[0], xs[0].dtype)(xs)
        return [calm(x + y) for x, y in zip(xs, ys, strict=True)]

    def transform(
        self, function: Functions, names: tuple[str, ...], dtype: torch.dtype
    ) -> Functions:
        for i, name in enumerate(names):
            ws = weights(100 + i, self.size, dtype)
            function = partial(_transform_all, name, function, ws)
        return function


def _transform_all(
    name: str, function: Functions, ws: list[Tensor], xs: list[Tensor]
) -> list[Tensor]:
    result: Any
    if name == "grad":
        result = torch.func.grad(lambda ts: sum(map(dot, function(ts), ws)))(xs)
    elif name == "vjp":
        result = torch.func.vjp(function, xs)[1](ws)[0]
    elif name == "jvp":
        result = torch.func.jvp(function, (xs,), (ws,))[1]
    elif name == "jacrev":
        jacobians: Any = torch.func.jacrev(lambda ts: sum(function(ts)))(xs)
        result = [torch.einsum("ij,ijkl->kl", w, j) for w, j in zip(ws, jacobians, strict=True)]
    elif name == "jacfwd":
        zeros = torch.zeros_like(xs[0])
        jacobians = torch.func.jacfwd(lambda t: function([x + t for x in xs]))(zeros)
        result = [torch.einsum("ijkl,kl->ij", j, w) for w, j in zip(ws, jacobians, strict=True)]
    else:
        result = [a + b for a, b in zip(function(xs), function([0.5 * x for x in xs]), strict=True)]
    return list(result)


def model(what: str, k: int, xs: list[Tensor]) -> list[Tensor]:  # noqa: PLR0911 - as above
    n, root = len(xs), k % len(xs)
    rows = torch.stack(xs)
    if what in ("sum", "prod", "max"):
        reductions: dict[str, Any] = {"sum": rows.sum, "prod": rows.prod, "max": rows.amax}
        return [reductions[what](0)] * n
    if what == "bcast":
        return [xs[root]] * n
    if what == "reduce":
        return [rows.sum(0) if r == root else 0 * xs[r] for r in range(n)]
    if what == "allgather":
        return [weighted(rows)] * n
    if what == "gather":
        return [weighted(rows) if r == root else 0 * xs[r] for r in range(n)]
    if what == "scatter":
        return [xs[root] * (r + 1) for r in range(n)]
    if what == "scan":
        return [rows[: r + 1].sum(0) for r in range(n)]
    if what == "exscan":
        return [rows[:r].sum(0) if r else 0 * xs[r] for r in range(n)]
    if what == "alltoall":
        return [torch.stack([x * (r + 1 + s) for s, x in enumerate(xs)]).sum(0) for r in range(n)]
    if what == "reduce_scatter":
        return [rows.sum(0) * (r + 1) for r in range(n)]
    return [xs[(r - k) % n] for r in range(n)]


# Both, and their derivatives


def check(ranks: Ranks, one: OneProcess, program: Program) -> None:
    """Run ``program`` on the ranks and in one process, and compare what they give."""
    size, rank = ranks.comm.size, ranks.comm.rank
    xs = inputs([SHAPE] * size, program.dtype, program.seed)
    loss_weights = weights(program.seed + 1, size, program.dtype)
    if program.mode != "plain":
        for r in range(size):
            loss_weights[r] *= random.Random(f"{program.seed} {r}").choice([0.0, 1.0, -2.0])
    found = _found(ranks, program, xs[rank], loss_weights[rank])
    wanted = one.wanted(program, xs, loss_weights)
    assert len(found) == len(wanted)
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if not torch.allclose(ours, theirs[rank], rtol=1e-7, atol=1e-9):
            error = (ours - theirs[rank]).abs().max()
            allowed = one.errors(program, xs, loss_weights)[number]
            assert error < allowed, f"result {number} differs by {error}, of {allowed} by rounding"


def _wanted(
    one: OneProcess, program: Program, xs: list[Tensor], ws: list[Tensor]
) -> list[list[Tensor]]:
    function = one.function(program.body)
    if program.mode == "transformed":
        return [one.transform(function, program.transforms, program.dtype)(xs)]
    if program.mode == "dual":
        duals: Any = torch.func.jvp(function, (xs,), (ws,))
        ys, ts = duals
        return [list(ys), list(ts)]
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = function(leaves)
    results, total = [[y.detach() for y in ys]], sum(map(dot, ys, ws), _nothing(leaves))
    order = _order(program.mode)
    for i in range(order):
        gs = torch.autograd.grad(
            total, leaves, create_graph=i + 1 < order, allow_unused=True, materialize_grads=True
        )
        results.append([g.detach() for g in gs])
        total = sum((dot(g.sin(), w) for g, w in zip(gs, ws, strict=True)), _nothing(leaves))
    return results


def _nothing(leaves: list[Tensor]) -> Tensor:
    """Return zero, which has a graph where a program ignores all results."""
    return sum((0 * x).real.sum() for x in leaves)  # type: ignore[return-value]


def _order(mode: str) -> int:
    return {"first": 1, "plain": 1, "third": 3}.get(mode, 2)


def _found(ranks: Ranks, program: Program, x: Tensor, w: Tensor) -> list[Tensor]:
    function, comm = ranks.function(program.body), ranks.comm
    if program.mode == "transformed":
        return [transformed(function, program.transforms, comm, program.dtype)(x)]
    if program.mode == "dual":
        with torch.no_grad(), forward_ad.dual_level():
            y = forward_ad.unpack_dual(function(forward_ad.make_dual(x, w)))
            return [y.primal, torch.zeros_like(x) if y.tangent is None else y.tangent]
    leaf = x.clone().requires_grad_()
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    order = _order(program.mode)
    with mpi.chain() if program.in_chain else contextlib.nullcontext():
        y = function(leaf)
        results = [y.detach()]
        if order == 1:
            loss = dot(y, w)
            if program.mode == "plain":
                loss.backward()
            else:
                mpi.backward(None if not w.any() and _has_no_reentrant(program.body) else loss)
            return [*results, torch.zeros_like(x) if leaf.grad is None else leaf.grad]
        loss = dot(y, w)
        for i in range(order - (program.mode == "second closed")):
            (g,) = mpi.grad(loss, leaf, create_graph=i + 1 < order, **options)
            results.append(g.detach())
            loss = dot(g.sin(), w)
    if program.mode == "second closed":
        (g,) = torch.autograd.grad(loss, leaf, **options)
        results.append(g.detach())
    if not program.in_chain:
        mpi.reset()
    return results


def _has_no_reentrant(body: list[Statement]) -> bool:
    return all(s.kind != "reentrant" and _has_no_reentrant(s.body) for s in body)
