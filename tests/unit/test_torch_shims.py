"""Every private torch call that TorchRelay leans on still does what it leans on."""

from __future__ import annotations

import pytest
import torch

from torchrelay import _torch
from torchrelay.errors import PeerLostError


def test_has_fast_bfloat16_follows_the_processor() -> None:
    assert isinstance(_torch.has_fast_bfloat16(), bool)


def test_callback_error_unwraps_what_a_callback_raised() -> None:
    def fail(_: torch.futures.Future[int]) -> int:
        raise PeerLostError("rank 1 has died;\nlook at its output")

    first: torch.futures.Future[int] = torch.futures.Future()
    second = first.then(fail)
    first.set_result(1)
    with pytest.raises(RuntimeError) as caught:
        second.wait()
    assert _torch.callback_error(caught.value) == ("PeerLostError", "rank 1 has died;\nlook at its output")


def test_callback_error_leaves_other_errors_alone() -> None:
    assert _torch.callback_error(RuntimeError("out of memory: PeerLostError: no")) is None
