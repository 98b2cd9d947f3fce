"""Find a heat source from a measured temperature, through a solver that is distributed over ranks.

    mpirun -n 4 python examples/mpi_heat.py [--plot heat.png]

The 2-d heat equation du/dt = laplace(u) + source is solved by explicit steps on a grid cut into one
block a rank; before each step every block gets a halo of its neighbours' values. The source is
fitted by L-BFGS through the whole solve: the gradient runs back through every halo exchange of
every step, and the optimizer's inner products are summed over the ranks, so the fit does not depend
on how many there are.
"""

import argparse
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from torchrelay import mpi

GRID, STEPS, RATE, TIME_STEP = 32, 60, 20, 0.2


def source_of(rows: Tensor, columns: Tensor) -> Tensor:
    """The truth: two hot spots and a cold one."""
    spots = ((8.0, 9.0, 1.0), (22.0, 20.0, 1.5), (10.0, 24.0, -1.0))
    return sum(
        (h * torch.exp(-((rows - r) ** 2 + (columns - c) ** 2) / 12) for r, c, h in spots),
        torch.zeros(()),
    )


def solve(grid: mpi.CartCommunicator, source: Tensor) -> Tensor:
    """The temperature after all steps; it is zero at first, and beyond the border."""
    u = torch.zeros_like(source)
    for _ in range(STEPS):
        p = grid.Halo_exchange(u)
        laplace = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u
        u = u + TIME_STEP * (laplace + source)
    return u


class SpreadLBFGS:
    """L-BFGS for a tensor of which every rank has a block: inner products are sums over all
    ranks.
    """

    def __init__(self, comm: mpi.Communicator, x: Tensor, history: int = 10) -> None:
        self.comm = comm
        self.x = x
        self.pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=history)
        self.before: tuple[Tensor, Tensor] | None = None  # x and its gradient

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self.comm.Allreduce((a * b).sum(), mpi.MPI_SUM)  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self) -> None:
        """Moves along the two-loop recursion's direction; ``x.grad`` is this rank's block of the
        gradient.
        """
        assert self.x.grad is not None
        x, grad = self.x.clone(), self.x.grad.clone()
        if self.before is not None:
            s, y = x - self.before[0], grad - self.before[1]
            self.pairs.append((s, y, self.dot(s, y)))
        self.before = x, grad
        direction, shares = -grad, []
        for s, y, sy in reversed(self.pairs):
            shares.append(self.dot(s, direction) / sy)
            direction = direction - shares[-1] * y
        if self.pairs:
            _, y, sy = self.pairs[-1]
            direction = direction * (sy / self.dot(y, y))
        else:
            direction = direction * (1 / self.dot(grad.sign(), grad)).clamp(max=1.0)
        for (s, y, sy), share in zip(self.pairs, reversed(shares), strict=True):
            direction = direction + (share - self.dot(y, direction) / sy) * s
        self.x += direction


def block(extent: int, parts: int, index: int) -> slice:
    return slice(extent * index // parts, extent * (index + 1) // parts)


def plot(path: Path, truth: Tensor, fitted: Tensor, temperature: Tensor) -> None:
    import matplotlib  # noqa: PLC0415 - only one rank draws

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for ax, values, title in zip(
        axes, (temperature, truth, fitted), ("temperature", "source", "fitted"), strict=True
    ):
        figure.colorbar(ax.imshow(values), ax=ax)
        ax.set_title(title)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--plot", type=Path, help="save a picture of the source, the fit and the temperature"
    )
    parser.add_argument("--iterations", type=int, default=RATE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    world = mpi.COMM_WORLD
    dims = next(
        (d, world.size // d) for d in range(int(world.size**0.5), 0, -1) if world.size % d == 0
    )
    grid = world.Cart(dims)
    assert grid is not None
    rows, columns = (
        block(GRID, parts, index) for parts, index in zip(dims, grid.coords, strict=True)
    )
    everywhere = torch.meshgrid(*[torch.arange(GRID, dtype=torch.float64)] * 2, indexing="ij")
    truth = source_of(*everywhere)
    with torch.no_grad():
        measured = solve(grid, truth[rows, columns])

    source = torch.zeros_like(measured, requires_grad=True)
    optimizer = SpreadLBFGS(grid, source)
    losses = []
    for _ in range(arguments.iterations):
        source.grad = None
        misfit = (solve(grid, source) - measured).square().sum()
        loss = grid.Allreduce(misfit, mpi.MPI_SUM)
        (loss / grid.size).backward()  # the sum of all ranks' losses is differentiated
        losses.append(float(loss.detach()))
        optimizer.step()
    parts = [None] * world.size
    with torch.no_grad():
        blocks = (world.Gather(t.reshape(-1), 0, 0) for t in (source, measured))
        order = world.Gather(
            (torch.arange(GRID * GRID).view(GRID, GRID)[rows, columns]).reshape(-1), 0, 0
        )
        fitted, temperature = (
            torch.zeros(GRID * GRID, dtype=torch.float64).index_copy(0, order, b).view(GRID, GRID)
            if world.rank == 0
            else b
            for b in blocks
        )
    assert losses[-1] < 0.02 * losses[0], losses
    if world.rank == 0:
        print(
            f"{len(parts)} ranks as {dims}: the misfit fell from {losses[0]:.3g} to "
            f"{losses[-1]:.3g}"
        )
        print(
            "correlation of the fitted source with the truth: "
            f"{float(torch.corrcoef(torch.stack([fitted.flatten(), truth.flatten()]))[0, 1]):.3f}"
        )
        if arguments.plot:
            plot(arguments.plot, truth, fitted, temperature)


if __name__ == "__main__":
    main()
