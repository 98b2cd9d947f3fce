"""The worker process: forked from one that the daemon started (:mod:`._fork_server`), with which it
ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator

import numpy as np
import torch

from torchrelay._helper import Channel
from torchrelay.errors import PeerLostError
from torchrelay.switching.device._cache import SharedCache
from torchrelay.switching.worker import _messages
from torchrelay.switching.worker._fork_server import serve
from torchrelay.switching.worker._request_buffer import RequestBuffer
from torchrelay.switching.worker._runner import ModelRunner

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def _prepare_cuda(device: torch.device, arena_bytes: int, workers: int) -> None:
    """Create the CUDA context and library handles, and bound this worker's activations.

    Each worker gets the same share of what the arena leaves: none can take another's memory.
    """
    torch.cuda.set_device(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    share = max(total_bytes - arena_bytes, 0) / total_bytes / workers
    torch.cuda.set_per_process_memory_fraction(share, device)
    ones = torch.ones(8, 8, device=device)
    (ones @ ones).cpu()


def _parts(channel: Channel, count: int) -> Iterator[int]:
    """Yield the descriptors of the arena, in order; each is open until the next is asked for."""
    first = 0
    while first < count:
        channel.send(_messages.WantParts(first))
        received = channel.receive()
        assert received is not None
        for descriptor in received[1]:
            yield descriptor
            os.close(descriptor)
        first += len(received[1])


def _follow_daemon() -> None:
    """End with the daemon, or with the server that was forked from, which ends with the daemon."""
    # It may be killed while a request computes for long.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C, and systemd's SIGTERM, reach the whole group; the daemon decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not ignored: processes that a model starts would inherit that, and pools end theirs so.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def main() -> None:
    """Serve as what workers are forked from, and run a worker in each such process. The last
    argument is the descriptor of a channel to the daemon.
    """
    _follow_daemon()
    try:
        channel, start, requests = serve(Channel(socket.socket(fileno=int(sys.argv[-1]))))
        _follow_daemon()
        np.random.seed()  # as Python does with its own generator, after a fork
        if start.threads:
            torch.set_num_threads(start.threads)
        cache = SharedCache.from_descriptors(start.arena, _parts(channel, start.arena["parts"]))
        buffers = [RequestBuffer.open(one) for one in requests]
        if cache.device.type == "cuda":
            _prepare_cuda(cache.device, cache.size_bytes, start.workers)
        ModelRunner(channel, cache, buffers).run()
    except PeerLostError:
        sys.exit(0)  # the daemon has exited


if __name__ == "__main__":
    main()
