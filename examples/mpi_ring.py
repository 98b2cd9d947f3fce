"""A ring of ranks that pass a tensor on, differentiated without any hint about the order.

    mpirun -n 3 python examples/mpi_ring.py

Each rank sends its tensor up and receives from below. The loss of a rank is its weight times what
it received, so the gradient of what it sent is the weight of the rank above.
"""

import torch

from torchrelay import mpi


def main() -> None:
    comm = mpi.COMM_WORLD
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.full((3,), float(comm.rank), requires_grad=True)
    received = torch.empty(3)
    handle = comm.Isend(x, above)
    comm.Recv(received, below)
    comm.Wait(handle)
    ((comm.rank + 1) * received).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.tolist() == [above + 1.0] * 3
    print(
        f"rank {comm.rank} received {received.tolist()} from {below}; gradient {x.grad.tolist()} "
        f"came from {above}"
    )


if __name__ == "__main__":
    main()
