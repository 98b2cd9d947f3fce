"""Asynchronous saves that fail say so: at the next call, in the log, and in the metrics. The last
good checkpoint stays, and the save after the next succeeds.

Each failure is injected at each phase: while the state is staged, while the parts are written, and
while the checkpoint is committed.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import faulty_writer
from faulty_writer import fail_in
from s3 import s3_bucket
from torchrelay import _helper, _telemetry
from torchrelay.checkpoint import SaveHandle, async_save, latest, load, save, verify
from torchrelay.checkpoint.engine._background import saver
from torchrelay.errors import PeerLostError, StorageError, TorchRelayError
from waiting import eventually


class _Failure(NamedTuple):
    """What goes wrong, as an error code of the system calls; none: the process is killed."""

    code: int | None
    error: type[TorchRelayError]
    message: str


_FAILURES = {
    "a full disk": _Failure(errno.ENOSPC, StorageError, "No space left .* free some space"),
    "a quota": _Failure(errno.EDQUOT, StorageError, "quota"),
    "a permission": _Failure(errno.EACCES, StorageError, "Permission denied.* check its owner"),
    "a failing disk": _Failure(errno.EIO, StorageError, "Input/output error"),
    "a kill": _Failure(None, PeerLostError, "the writer process has died .*SIGKILL"),
}
# In which system call, on which file, a failure comes.
_PHASES = {
    "write": [("open", "data-"), ("pwrite", "data-"), ("fsync", "data-")],
    "commit": [("open", "manifest"), ("pwrite", "manifest"), ("fsync", "saving"), ("rename", "")],
}


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


def _check(path: str | Path, step: int) -> None:
    assert verify(path)
    state = _state(-1)
    load(state, path)
    assert state["step"] == step and torch.equal(state["w"], _state(step)["w"])


@pytest.fixture(autouse=True)
def no_writer_left() -> Iterator[None]:
    saver.close()
    yield
    saver.close()


def _counted(outcome: str) -> float:
    return sum(
        sample.value
        for sample in _telemetry.samples()
        if sample.name == f"checkpoint_saves_{outcome}"
    )


def _check_it_is_said(
    start: Callable[[], SaveHandle],
    failure: _Failure,
    caplog: pytest.LogCaptureFixture,
    next_call: Callable[[], object],
) -> None:
    """``start`` starts a save that fails; nobody looks at its handle before the next call."""
    failed, committed = _counted("failed"), _counted("committed")
    path = start().path
    eventually(lambda: _counted("failed") == failed + 1, timeout_s=60)  # by a scrape alone
    assert _counted("committed") == committed
    with pytest.raises(failure.error, match=failure.message) as caught:
        next_call()
    assert os.path.basename(path) in str(caught.value)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(said) == 1 and said[0] == f"an asynchronous save has failed: {caught.value}"


@pytest.mark.parametrize("name", _FAILURES)
@pytest.mark.parametrize("phase", _PHASES)
def test_a_save_that_fails_in_the_writer_process(
    name: str,
    phase: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = _FAILURES[name]
    async_save(_state(0), tmp_path / "step-0").result(60)
    for number, (call, file) in enumerate(_PHASES[phase], start=1):
        saver.close()
        caplog.clear()
        arguments = [call, file or f".step-{number}", str(failure.code or 0)]

        def faulty(command: list[str], arguments: list[str] = arguments, **options: Any) -> Any:
            program = [sys.executable, faulty_writer.__file__, *arguments, command[-1]]
            return subprocess.Popen(program, **options)

        path = tmp_path / f"step-{number}"
        stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": faulty})
        with monkeypatch.context() as patch:
            patch.setattr(_helper, "subprocess", stand_in)

            def start(path: Path = path) -> SaveHandle:
                return async_save(_state(1), path, keep=1)

            def next_call(call: Any = async_save if number % 2 else save) -> None:
                call(_state(2), tmp_path / "other-1")

            _check_it_is_said(start, failure, caplog, next_call)
        assert latest(tmp_path) == str(tmp_path / "step-0"), "keep=1 has removed the last good one"
        _check(tmp_path / "step-0", 0)
    saver.close()
    async_save(_state(3), tmp_path / "step-9", keep=1).result(60)
    _check(tmp_path / "step-9", 3)
    assert os.listdir(tmp_path) == ["step-9"]


@pytest.mark.parametrize("name", [name for name, one in _FAILURES.items() if one.code])
def test_a_save_that_cannot_be_staged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call itself says so: the state was not copied."""
    failure = _FAILURES[name]
    assert failure.code is not None
    async_save(_state(0), tmp_path / "step-0").result(60)
    calls = ["open", "pwrite"]
    if sys.version_info >= (3, 11):  # before, pathlib keeps the function
        calls.append("mkdir")
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, getattr(os, call))  # restored at the end
            fail_in(call, ".step-1", failure.code)
            with pytest.raises(failure.error, match=failure.message):
                async_save(_state(1), tmp_path / "step-1", keep=1)
        _check(latest(tmp_path), 0)
        async_save(_state(0), tmp_path / "step-0", keep=1).result(60)
    assert os.listdir(tmp_path) == ["step-0"]


def test_a_writer_that_is_killed_while_the_state_is_staged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_save(_state(0), tmp_path / "step-0").result(60)
    copy = type(saver.staging).copy

    def killed(*args: Any) -> None:
        copy(*args)
        assert saver.helper is not None
        os.kill(saver.helper.pid, signal.SIGKILL)

    def start() -> SaveHandle:
        with monkeypatch.context() as patch:
            patch.setattr(type(saver.staging), "copy", killed)
            return async_save(_state(1), tmp_path / "step-1", keep=1)

    def next_call() -> object:
        return async_save(_state(2), tmp_path / "step-2", keep=1)

    _check_it_is_said(start, _FAILURES["a kill"], caplog, next_call)
    _check(latest(tmp_path), 0)
    async_save(_state(3), tmp_path / "step-3", keep=1).result(60)
    _check(latest(tmp_path), 3)
    assert os.listdir(tmp_path) == ["step-3"]


def test_what_retention_cannot_remove_is_no_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says that the checkpoint is committed."""
    save(_state(0), tmp_path / "step-0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", os.rename)
        fail_in("rename", "step-0", errno.EACCES)
        with pytest.raises(StorageError, match=r"step-1 is committed, but .*Permission denied"):
            save(_state(1), tmp_path / "step-1", keep=1)
    _check(latest(tmp_path), 1)


def test_a_writer_says_so_when_the_trainer_has_left_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As at the end of training, when nobody calls again."""
    async_save(_state(0), tmp_path / "step-0").result(60)
    assert saver.helper is not None
    os.kill(saver.helper.pid, signal.SIGSTOP)
    async_save(_state(1), tmp_path / "step-1")
    (tmp_path / ".step-1.torchrelay-saving" / "data-00000-00000.safetensors").touch()
    os.kill(saver.helper.pid, signal.SIGCONT)
    saver.close()  # as at exit
    assert "an asynchronous save has failed: rank 0: creating" in capfd.readouterr().err
    _check(latest(tmp_path), 0)


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts: an S3 server answers 503 for PUT and POST requests whose paths contain one of them."""
    with s3_bucket(monkeypatch):
        from moto.s3.responses import S3Response

        refused: list[str] = []
        respond = S3Response.key_response
        sentence = (
            "<Error><Code>SlowDown</Code><Message>Please reduce your request rate</Message></Error>"
        )

        def responded(self: Any, request: Any, full_url: str, headers: dict[str, Any]) -> Any:
            if request.method != "GET" and any(part in full_url for part in refused):
                return 503, {}, sentence
            return respond(self, request, full_url, headers)

        monkeypatch.setattr(S3Response, "key_response", responded)
        yield refused
        refused.clear()


def test_a_store_that_is_overloaded(slow_down: list[str], caplog: pytest.LogCaptureFixture) -> None:
    url = "s3://bucket/run"
    async_save(_state(0), f"{url}/step-0").result(100)
    failure = _Failure(None, StorageError, "SlowDown|reduce your request rate|503")
    for number, refused in enumerate(["step-{}/data-", "step-{}/manifest"], start=1):
        caplog.clear()
        slow_down[:] = [refused.format(number)]

        def start(number: int = number) -> SaveHandle:
            return async_save(_state(1), f"{url}/step-{number}", keep=1)

        def next_call(number: int = number) -> object:
            return async_save(_state(2), f"{url}/other-{number}")

        _check_it_is_said(start, failure, caplog, next_call)
        slow_down.clear()
        _check(latest(url), 0)
    slow_down[:] = ["step-3/torchrelay-saving"]
    with pytest.raises(StorageError, match=failure.message):  # stage
        async_save(_state(1), f"{url}/step-3")
    slow_down.clear()
    async_save(_state(4), f"{url}/step-4", keep=1).result(100)
    _check(latest(url), 4)
