"""A contrastive loss whose negatives are on all ranks: Allgather, differentiated.

    mpirun -n 2 python examples/mpi_contrastive.py

Two views of each sample must find each other among all samples of all ranks (InfoNCE, van den Oord
et al. 2018). A rank's embeddings are other ranks' negatives, so the gradient needs what comes back
through Allgather; with the gathered tensors detached, as is common, it is a different one.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from torchrelay import mpi

SAMPLES, FEATURES, EMBEDDING, TEMPERATURE = 64, 20, 8, 0.2


def contrastive_loss(first: Tensor, second: Tensor, offset: int) -> Tensor:
    """``first`` holds this rank's embeddings; ``second`` everybody's, in which ours start at
    ``offset``.
    """
    similarity = first @ second.t() / TEMPERATURE
    return cross_entropy(
        similarity, torch.arange(offset, offset + len(first)), reduction="sum"
    ) / len(second)


def main() -> None:
    comm = mpi.COMM_WORLD
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    views = [
        data + 0.3 * torch.randn(data.shape, generator=generator, dtype=torch.float64)
        for _ in range(2)
    ]
    start, end = SAMPLES * comm.rank // comm.size, SAMPLES * (comm.rank + 1) // comm.size
    weight = torch.randn(
        FEATURES, EMBEDDING, generator=generator, dtype=torch.float64, requires_grad=True
    )
    optimizer = torch.optim.Adam([weight], lr=0.05)
    losses = []
    for _ in range(100):
        shared = comm.Allreduce(weight, mpi.MPI_SUM) / comm.size
        first, second = (normalize(view[start:end] @ shared, dim=1) for view in views)
        local = contrastive_loss(first, comm.Allgather(second, 0), start)
        loss = comm.Allreduce(local, mpi.MPI_SUM)
        optimizer.zero_grad()
        (loss / comm.size).backward()  # the ranks' losses are summed, and each holds the same one
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses[::10]
    if comm.rank == 0:
        print(f"{comm.size} ranks: the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
