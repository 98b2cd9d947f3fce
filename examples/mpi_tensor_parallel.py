"""A two-layer perceptron whose weights are cut over the ranks: column-parallel, then row-parallel.

    torchrun --nproc-per-node 2 examples/mpi_tensor_parallel.py
    mpirun -n 2 python examples/mpi_tensor_parallel.py

Under the convention "replicated" each rank holds a replica of the loss. `Replicate` marks the input
as used by each rank's own columns, so its gradient is summed; the derivative of `Allreduce` is then
the identity. The result and the gradients are those of the whole layer on one process.
"""

import torch
from torch import Tensor, nn

from torchrelay import mpi

FEATURES, HIDDEN, BATCH = 8, 12, 4


class TensorParallelMlp(nn.Module):
    """Holds this rank's part of the hidden units."""

    def __init__(self, comm: mpi.Communicator, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.comm = comm.replace(convention="replicated")
        self.up = nn.Parameter(up.tensor_split(comm.size, 0)[comm.rank].clone())
        self.down = nn.Parameter(down.tensor_split(comm.size, 1)[comm.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.comm.Replicate(x) @ self.up.T).relu()
        return self.comm.Allreduce(hidden @ self.down.T, mpi.MPI_SUM)  # type: ignore[no-any-return]


def main() -> None:
    comm = mpi.COMM_WORLD
    torch.manual_seed(0)  # the same on all ranks
    up, down = torch.randn(HIDDEN, FEATURES), torch.randn(FEATURES, HIDDEN)
    x = torch.randn(BATCH, FEATURES)
    whole, part = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = (whole @ up.T).relu() @ down.T
    expected.square().sum().backward()  # type: ignore[no-untyped-call]

    layer = TensorParallelMlp(comm, up, down)
    y = layer(part)
    y.square().sum().backward()
    assert whole.grad is not None and part.grad is not None
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(part.grad, whole.grad, rtol=1e-4, atol=1e-2)
    print(f"rank {comm.rank} holds {len(layer.up)} of {HIDDEN} hidden units; the gradient agrees")


if __name__ == "__main__":
    main()
