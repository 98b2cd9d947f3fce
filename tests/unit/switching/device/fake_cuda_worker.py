"""A worker process on the fake CUDA driver; everything else is the worker's own code."""

from __future__ import annotations

import fake_driver  # type: ignore[import-not-found]  # this file's folder is the first on the path
import torch

from torchrelay.switching.worker import _runner, _worker

if __name__ == "__main__":
    fake_driver.install(fake_driver.FakeDriver())
    # The tensors are in host memory, and there is no device that computes.
    _runner._to = lambda inputs, device: inputs
    _worker._prepare_cuda = lambda device, arena_bytes, workers: None
    torch.cuda.synchronize = lambda device=None: None
    _worker.main()
