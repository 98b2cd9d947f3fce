"""Checkpoints in memory: damage, limits, strangers, and the end of the memory server. What is lost
is reported, and what is left ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memory_jobs import end_servers, server_pid
from torchrelay import _telemetry
from torchrelay.checkpoint import Checkpointer, load, save, verify
from torchrelay.checkpoint.engine._background import saver
from torchrelay.checkpoint.engine._written import assemble
from torchrelay.checkpoint.format._manifest import Head
from torchrelay.checkpoint.memory._folder import SCHEME
from torchrelay.checkpoint.memory._part import manifest_of
from torchrelay.checkpoint.memory._server import _POLL_S
from torchrelay.checkpoint.memory._socket import SOCKET, MemoryClient, folder_of, job_of
from torchrelay.cli import app
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    CorruptionError,
    PeerLostError,
    StorageError,
    UnavailableError,
)
from waiting import eventually


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    saver.close()
    end_servers(0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")


Opened = Callable[..., Checkpointer]


@pytest.fixture
def opened(path: str) -> Iterator[Opened]:
    """Opens the job at ``path``, any number of times."""
    found: list[Checkpointer] = []

    def opened(disk_every: int | None = None, **options: Any) -> Checkpointer:
        found.append(Checkpointer(path, disk_every=disk_every, **options))
        return found[-1]

    yield opened
    for job in found:
        job._leave()


@pytest.fixture
def job(opened: Opened) -> Checkpointer:
    return opened()


def _state(step: int, size: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step)), "t": torch.arange(step + 1.0), "step": step}


def _saved(job: Checkpointer, *steps: int) -> None:
    for step in steps:
        job.save({"w": torch.full((5000,), float(step)), "step": step}, step=step)
    job.wait()


def _loaded(job: Checkpointer) -> int | None:
    state: dict[str, Any] = {"w": torch.full((5000,), -1.0), "step": None}
    step = job.load(state)
    if step is not None:
        assert state["step"] == step and torch.equal(state["w"], torch.full((5000,), float(step)))
    return step


def _damage(path: str, step: int) -> None:
    """Change a byte of a tensor in memory."""
    with closing(MemoryClient(job_of(path))) as client:
        (info,) = (info for info in client.ask("list") if info.step == step)
        fd = client.ask("open", info.key)
        (byte,) = os.pread(fd, 1, info.size_bytes - 1)
        os.pwrite(fd, bytes([byte ^ 1]), info.size_bytes - 1)
        os.close(fd)


def test_states_of_changing_layouts(path: str) -> None:
    """Whatever lay in the memory before; a URL of what is there is that of any checkpoint."""
    with Checkpointer(path, disk_every=None) as job:
        for step in range(5):
            job.save(_state(step, size=3000 - 500 * step), step=step)
            job.wait()
            state = _state(-1, size=3000 - 500 * step) | {"t": torch.zeros(step + 1)}
            url = f"{SCHEME}{job_of(path)}/step-{step}"
            assert verify(url)
            load(state, url)
            assert state["step"] == step
            assert all(torch.equal(state[k], _state(step, 3000 - 500 * step)[k]) for k in "wt")


def test_damage_in_memory_is_noticed_and_the_step_before_is_loaded(
    job: Checkpointer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(job, 1, 2)
    _damage(path, 2)
    assert _loaded(job) == 1
    assert any("step 2 cannot be loaded" in one.getMessage() for one in caplog.records)
    _damage(path, 1)
    with pytest.raises(CorruptionError, match=r"step-2.*tensor 'w' is damaged"):
        _loaded(job)
    _saved(job, 3)  # what is damaged gives way
    _damage(path, 3)
    with pytest.raises(CorruptionError, match="step-3"):
        _loaded(job)


def test_damage_on_the_disk_is_noticed_and_the_step_before_is_loaded(
    opened: Opened, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(memory=False, disk_every=1) as job:
        _saved(job, 1)
        _saved(job, 2)
    data = Path(f"{path}/step-2/data-00000-00000.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert _loaded(opened()) == 1
    assert any("step 2 cannot be loaded" in each for each in caplog.messages)


def test_the_disk_has_what_memory_has_lost(
    opened: Opened, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = opened(disk_every=2, keep=1)
    _saved(job, 1, 2, 3, 4, 5)
    os.kill(server_pid(job.path), signal.SIGKILL)
    eventually(lambda: not _answers(path))
    assert _loaded(opened(disk_every=2)) == 4
    assert any("was killed; what only it had is lost" in each for each in caplog.messages)
    assert os.listdir(path) == ["step-4"]


def _answers(path: str) -> bool:
    try:
        MemoryClient(job_of(path)).close()
    except OSError:
        return False
    return True


def test_a_killed_server_is_reported_and_replaced(
    job: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    _saved(job, 1)
    job.save({"w": torch.zeros(5000), "step": 2}, step=2)
    before = _failed()
    os.kill(server_pid(job.path), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"rank 0: the process that keeps .* has ended"):
        _saved(job, 3)
    assert _failed() == before + 1
    said = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(said) == 1 and "a checkpoint in memory has failed" in said[0].getMessage()
    _saved(job, 3)
    assert _loaded(job) == 3


def _failed() -> float:
    samples = _telemetry.samples()
    return sum(one.value for one in samples if one.name == "checkpoint_saves_failed")


def test_a_limit_of_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints fit; a larger one is refused, and the last stays."""
    monkeypatch.setenv("TORCHRELAY_CHECKPOINT_MEMORY_BYTES", "50000")
    with Checkpointer(path, disk_every=None) as job:
        _saved(job, 1, 2, 3)
        with pytest.raises(CapacityError, match=r"step 4 needs .* of 50000 are in use.*_MEMORY_"):
            job.save({"w": torch.zeros(50_000)}, step=4)
        assert _loaded(job) == 3
        _saved(job, 5)


def test_memory_ends_some_time_after_its_trainers(
    opened: Opened, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_CHECKPOINT_MEMORY_TTL_S", "0.2")
    job = opened()
    _saved(job, 1)
    assert os.path.exists(folder_of(job_of(path)))
    job.close()
    eventually(lambda: not os.path.exists(folder_of(job_of(path))))
    assert _loaded(opened()) is None


def test_memory_ends_when_it_is_dropped(job: Checkpointer, path: str) -> None:
    _saved(job, 1)
    job.close(drop=True)
    eventually(lambda: not os.path.exists(folder_of(job_of(path))))


def test_nothing_is_started_again_to_close_what_is_dropped(opened: Opened, path: str) -> None:
    with opened() as job:
        _saved(job, 1)
        job.close(drop=True)
    eventually(lambda: not os.path.exists(folder_of(job_of(path))))
    opened().close()
    assert not os.path.exists(folder_of(job_of(path)))


def test_a_server_does_not_end_before_a_client_that_may_join(job: Checkpointer, path: str) -> None:
    _saved(job, 1)
    with closing(MemoryClient(job_of(path))) as client:
        job.close(drop=True)
        eventually(lambda: client.ask("status")["trainers"] == 0)
        time.sleep(2 * _POLL_S)
        client.ask("status")
    eventually(lambda: not os.path.exists(folder_of(job_of(path))))


def test_a_job_that_is_started_again_takes_over(job: Checkpointer, opened: Opened) -> None:
    """A rank of before that still runs cannot change anything."""
    _saved(job, 1)
    other = opened()
    assert _loaded(other) == 1
    with pytest.raises(PeerLostError, match="have taken over the checkpoints in memory"):
        _saved(job, 2)
    _saved(other, 5)
    assert _loaded(other) == 5


def test_a_trainer_of_before_drops_nothing(job: Checkpointer, opened: Opened) -> None:
    _saved(job, 1)
    other = opened()
    assert _loaded(other) == 1
    with pytest.raises(ArgumentError, match="trainers of this job run"):
        job.close(drop=True)
    _saved(other, 2)
    assert _loaded(opened()) == 2


@pytest.mark.parametrize("call", [_saved, lambda job, step: _loaded(job)])
def test_a_server_that_ends_between_calls_is_replaced(
    job: Checkpointer, path: str, call: Callable[[Checkpointer, int], object]
) -> None:
    """Nothing was being saved."""
    _saved(job, 1)
    os.kill(server_pid(job.path), signal.SIGKILL)
    eventually(lambda: not _answers(path))
    if call is _saved:
        with pytest.raises(PeerLostError, match="has ended"):
            call(job, 2)
    call(job, 2)
    _saved(job, 3)
    assert _loaded(job) == 3


def test_a_server_that_is_stopped_is_given_up(
    job: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late answers are not taken for others."""
    _saved(job, 1)
    server = server_pid(job.path)
    os.kill(server, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr("torchrelay.checkpoint.memory._socket._TIMEOUT_S", 0.2)
        with pytest.raises(PeerLostError, match=r"has not answered for 0\.2 s"):
            _saved(job, 2)
    os.kill(server, signal.SIGCONT)
    _saved(job, 3)
    assert _loaded(job) == 3


def test_an_interrupted_question_has_no_answer(
    job: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(job, 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr("torchrelay._helper.Channel.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _saved(job, 2)
    with pytest.raises(PeerLostError):
        _saved(job, 3)
    _saved(job, 3)
    assert _loaded(job) == 3


def test_a_server_that_cannot_start_is_reported(
    job: Checkpointer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, said in (
        ("import sys; sys.exit('no')", "no$"),
        ("import time; time.sleep(60)", "0.2"),
    ):
        with monkeypatch.context() as context:
            command = [sys.executable, "-c", code]
            home = "torchrelay.checkpoint.memory._socket"
            context.setattr(f"{home}.module_command", lambda _, command=command: command)
            context.setattr(f"{home}._TIMEOUT_S", 0.2 if "sleep" in code else 60.0)
            with pytest.raises(UnavailableError, match=f"cannot be started: .*{said}"):
                _saved(job, 1)
        assert not os.path.exists(folder_of(job_of(path)))
    _saved(job, 1)


def test_records_of_a_failed_save_are_no_checkpoint(job: Checkpointer, path: str) -> None:
    """Ranks that do not hold whole tensors notice it only after they have staged."""
    _saved(job, 1)
    with closing(MemoryClient(job_of(path))) as client:
        info, *_ = client.ask("list")
        record = json.loads(client.ask("record", info.key))
    head = Head(info.saved_at_ns, info.save_id, "step-1")
    assert manifest_of([json.dumps(record).encode()], head)
    record["chunks"].clear()
    with pytest.raises(CorruptionError, match=r"do not make a checkpoint .*'w'"):
        manifest_of([json.dumps(record).encode()], head)


def test_a_layout_is_checked_until_it_was_saved(
    job: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the parts of all ranks make a checkpoint."""
    checked: list[object] = []

    def counted(*arguments: Any) -> Any:
        checked.append(None)
        return assemble(*arguments)

    monkeypatch.setattr("torchrelay.checkpoint._checkpointer.assemble", counted)
    ask = MemoryClient.ask

    def failed(self: MemoryClient, name: str, *arguments: Any, **options: Any) -> Any:
        if name == "stage":
            raise PeerLostError("stopped")
        return ask(self, name, *arguments, **options)

    with monkeypatch.context() as context:
        context.setattr(MemoryClient, "ask", failed)
        with pytest.raises(PeerLostError, match="stopped"):
            _saved(job, 1)
    assert not checked
    _saved(job, 2, 3)
    assert len(checked) == 1 and _loaded(job) == 3


def test_steps_ascend(job: Checkpointer, opened: Opened, path: str) -> None:
    _saved(job, 3)
    for step in (3, 2):
        with pytest.raises(ArgumentError, match=r"has step 3, and steps ascend"):
            job.save({}, step=step)
    for bad in (True, -1, 4.5, "4", None):
        with pytest.raises(ArgumentError, match=r"must be an int of at least 0"):
            job.save({}, step=bad)  # type: ignore[arg-type]
    for name in ("7", "final", "8-ema", "09"):
        save({"w": torch.zeros(3)}, f"{path}/step-{name}")
    with pytest.raises(ArgumentError, match=r"has step 7, and steps ascend, .*load\(\) it first"):
        opened().save({}, step=7)


def test_strangers_get_nothing(job: Checkpointer, path: str, monkeypatch: Any) -> None:
    _saved(job, 1)
    folder = folder_of(job_of(path))
    monkeypatch.setenv("TORCHRELAY_TRANSPORT_KEY", "ab" * 32)
    with pytest.raises(StorageError, match="this host has no memory server of that job"):
        verify(f"{SCHEME}{job_of(path)}/step-1")
    monkeypatch.delenv("TORCHRELAY_TRANSPORT_KEY")
    os.chmod(folder, 0o755)
    with pytest.raises(UnavailableError, match="or others may enter it; remove it, or set TMPDIR"):
        MemoryClient(job_of(path))
    os.chmod(folder, 0o700)
    assert _loaded(job) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_other_users_are_turned_away(job: Checkpointer, path: str) -> None:
    """Although they have come into the folder."""
    _saved(job, 1)
    folder = folder_of(job_of(path))
    os.chmod(folder, 0o711)
    os.chmod(f"{folder}/{SOCKET}", 0o666)
    program = (
        "import os, socket, sys; os.chdir(sys.argv[1]); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('socket')\n"
        "s.settimeout(60); s.send(b'x'); print(s.recv(100))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder], check=False, capture_output=True, text=True
    )
    os.chmod(folder, 0o700)
    assert done.stdout == "b''\n" or "reset" in done.stderr or "Broken pipe" in done.stderr, done


def test_the_command(opened: Opened, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["checkpoint", *arguments])
        return result.output if result.exit_code == 0 else f"{result.exception}"

    monkeypatch.setenv("COLUMNS", "160")
    url = SCHEME + job_of(path)
    assert "no memory server of that job" in run("memory", "drop", path)
    job = opened()
    _saved(job, 9, 10)
    listed = run("memory", "ls")
    assert all(part in listed for part in (f"{url}/step-9", f"{url}/step-10", "1 trainers"))
    (found,) = json.loads(run("memory", "ls", "--json"))
    assert (found["url"], found["state"], found["trainers"]) == (url, "running", 1)
    assert found["seconds_left"] > 0
    steps = sorted(found["checkpoints"], key=lambda one: len(one["url"]))
    assert [one["url"] for one in steps] == [f"{url}/step-9", f"{url}/step-10"]
    assert all(one["parts"] == 1 and one["missing"] == 0 for one in steps)
    assert 0 < sum(one["size_bytes"] for one in steps) <= found["used_bytes"]
    assert run("verify", f"{url}/step-9") == f"{url}/step-9: whole\n"
    assert all(name in run("ls", url) for name in ("step-9", "step-10"))
    assert "5000" in run("inspect", f"{url}/step-10")
    assert run("convert", f"{url}/step-10", f"{path}/step-10") == f"{path}/step-10: written\n"
    state: dict[str, Any] = {"w": torch.zeros(5000), "step": None}
    load(state, path)
    assert state["step"] == 10 and torch.equal(state["w"], torch.full((5000,), 10.0))
    assert "trainers of this job run" in run("memory", "drop", path)
    job.close()
    assert "0 trainers" in run("memory", "ls")
    monkeypatch.setenv("COLUMNS", "60")
    first = [line.split("│")[1].strip() for line in run("memory", "ls").splitlines() if "│" in line]
    assert f"{url}/step-10" in "".join(first)
    monkeypatch.setenv("COLUMNS", "160")
    assert run("memory", "drop", url) == f"{url}: dropped\n"
    eventually(lambda: not os.path.exists(folder_of(job_of(path))))
    killed = opened()
    _saved(killed, 11)
    os.kill(server_pid(killed.path), signal.SIGKILL)
    eventually(lambda: not _answers(path))
    assert "was killed" in run("memory", "ls")
    assert run("memory", "ls", "--json") == "[]\n"


def test_what_was_staged_a_moment_ago_is_found(job: Checkpointer, path: str) -> None:
    """The server still computes the checksums when the trainer's successor looks."""
    _saved(job, 1)
    with closing(MemoryClient(job_of(path))) as client:
        job.save({"w": torch.zeros(10_000_000)}, step=2)
        assert [info.step for info in client.ask("list")] == [1, 2]
