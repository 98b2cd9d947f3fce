"""Data-parallel regression with L-BFGS: two Allreduces make a loss function of one process
parallel.

    mpirun -n 2 python examples/mpi_linear_regression.py

Each rank holds a part of the data. The parameters are averaged, which brings all ranks on the same
page, and the local losses are summed; the gradient of both comes with ``backward()``.
"""

import torch
from torch import Tensor

from torchrelay import mpi

POINTS = 1000


def model(x: Tensor, params: Tensor) -> Tensor:
    return params[0] * torch.exp(-params[1] * x) + params[2]


def main() -> None:
    comm = mpi.COMM_WORLD
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(POINTS, generator=generator, dtype=torch.float64)
    truth = torch.tensor([1.5, 0.7, 0.3], dtype=torch.float64)
    y = model(x, truth) + 0.01 * torch.randn(POINTS, generator=generator, dtype=torch.float64)
    mine = slice(POINTS * comm.rank // comm.size, POINTS * (comm.rank + 1) // comm.size)
    x, y = x[mine], y[mine]

    params = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([params], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        shared = comm.Allreduce(params, mpi.MPI_SUM) / comm.size
        local = (y - model(x, shared)).square().sum()
        loss: Tensor = comm.Allreduce(local, mpi.MPI_SUM) / comm.size
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach() * comm.size

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    error = float((params.detach() - truth).abs().max())
    assert error < 0.05, params
    if comm.rank == 0:
        print(f"{comm.size} ranks found {params.tolist()}, the truth is {truth.tolist()}")


if __name__ == "__main__":
    main()
