"""The ranks of one replica of an elastic job, which live and die together.

Each rank forms groups with the ranks of the same number of other replicas. The first one agrees
with the other replicas on who goes on; the others of its replica do as it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrelay import errors
from torchrelay.errors import OperationTimeoutError, PeerLostError, TorchRelayError

__all__ = ["Replica", "broadcast"]


def broadcast(group: Any, data: bytes, root: int) -> bytes:
    """Return the ``data`` of rank ``root``. Collective; blocks."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    size = torch.tensor([len(data)])
    group.broadcast([size], options).wait()
    own = data if group.rank() == root else bytes(int(size))
    text = torch.from_numpy(np.frombuffer(bytearray(own), np.uint8))
    group.broadcast([text], options).wait()
    return text.numpy().tobytes()


class Replica:
    """Methods are collective over the ranks of the replica, and block.

    Args:
        group: of the ranks of the replica; None: this process is all of it.
        timeout_s: how long the others wait for one rank.

    Attributes:
        rank, size: of this process in the replica.
        on_loss: called when another rank of the replica is lost.

    Raises:
        PeerLostError: from all methods, if another rank of the replica is lost.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank, self.size, self._group = 0, 1, None
        self.on_loss: Callable[[], None] = lambda: None
        if group is not None and group.size() > 1:
            self.rank, self.size = group.rank(), group.size()
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="sml",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
            )

    def largest(self, *values: float) -> list[float]:
        """Return the largest of each of ``values`` on all ranks."""
        if self._group is None:
            return [*values]
        every = torch.tensor(values, dtype=torch.float64)
        with self._whole():
            dist.all_reduce(every, dist.ReduceOp.MAX, self._group)
        return every.tolist()

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        if self._group is None:
            return [text]
        with self._whole():
            parts = [broadcast(self._group, text.encode(), root) for root in range(self.size)]
        return [part.decode() for part in parts]

    def from_first(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` returns on the first rank, a JSON value, or raise what it raises."""
        if self._group is None:
            return call()
        answer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                answer = {"value": call()}
            except TorchRelayError as error:
                answer = {"error": errors.to_json(error)}
        with self._whole():
            answer = json.loads(broadcast(self._group, json.dumps(answer).encode(), 0))
        if "error" in answer:
            raise errors.from_json(answer["error"])
        return answer["value"]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (PeerLostError, OperationTimeoutError) as error:
            self.on_loss()
            raise PeerLostError(
                f"this replica cannot go on, because one of its ranks is lost: {error}; end its "
                "processes and start it again, and it is healed by the others",
                error.ranks,
            ) from error
