from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from torchrelay.aggregation import Options
from torchrelay.aggregation._options import configuration_files, resolve
from torchrelay.config import Aggregation
from torchrelay.errors import ConfigError

ORIGINAL = """
[general]
rank = 0                      ; kept for the controller
num_workers = 2
num_worker_threads = 4
max_outstanding_packets = 256
packet_numel = 64
backend = dummy
scheduler = fifo
prepostprocessor = bypass
instant_job_completion = false
controller_ip = 127.0.0.1
controller_port = 50099
timeout = 10
timeout_threshold = 100
timeout_threshold_increment = 100

[backend.dummy]
bandwidth = 1000
process_packets = false

[backend.dpdk]
cores = 10-13
"""


def write(folder: Path, text: str) -> list[Path]:
    path = folder / "switchml.cfg"
    path.write_text(text)
    return [path]


def test_nothing_needs_to_be_configured() -> None:
    assert resolve(None, {}, []).plane == "auto"


def test_the_originals_file_is_understood(tmp_path: Path) -> None:
    settings = resolve(None, {}, write(tmp_path, ORIGINAL))
    assert settings.plane == "dummy"
    assert settings.dummy_bandwidth == 1000.0
    assert settings.dummy_process_packets is False
    assert settings.switch == "127.0.0.1"


def test_options_beat_environment_beats_file(tmp_path: Path) -> None:
    files = write(tmp_path, ORIGINAL)
    environ = {"TORCHRELAY_AGGREGATION_PLANE": "auto", "TORCHRELAY_AGGREGATION_SPIN_US": "5"}
    assert resolve(None, environ, files).plane == "auto"
    assert resolve(None, environ, files).dummy_bandwidth == 1000.0
    settings = resolve(Options(plane="shm", dummy_bandwidth=5), environ, files)
    assert (settings.plane, settings.dummy_bandwidth, settings.spin_us) == ("shm", 5, 5)


def test_the_packet_settings_of_a_file_count(tmp_path: Path) -> None:
    text = """[general]
switch = 192.0.2.9:48864
exact = true
num_worker_threads = 2
max_outstanding_packets = 64
packet_numel = 64
timeout = 2.5
timeout_threshold = 7
timeout_threshold_increment = 3
spin_us = 7
"""
    found = resolve(None, {}, write(tmp_path, text))
    assert (found.switch, found.exact) == ("192.0.2.9:48864", True)
    packets = (found.num_worker_threads, found.max_outstanding_packets, found.packet_numel)
    assert packets == (2, 64, 64)
    assert found.packet_timeout_s == 0.0025
    assert (found.timeout_threshold, found.timeout_threshold_increment) == (7, 3)
    assert found.spin_us == 7  # every setting can be in the file


@pytest.mark.parametrize(
    "keys",
    [
        ["switch = 1.1.1.1:7", "controller_ip = 2.2.2.2"],
        ["controller_ip = 2.2.2.2", "switch = 1.1.1.1:7"],
    ],
)
def test_a_switch_is_where_its_controller_is_unless_it_is_given(
    tmp_path: Path, keys: list[str]
) -> None:
    found = resolve(None, {}, write(tmp_path, "\n".join(["[general]", *keys])))
    assert found.switch == "1.1.1.1:7"


@pytest.mark.parametrize("backend", ["dpdk", "rdma"])
def test_a_plane_that_is_not_offered_is_replaced_with_a_warning(
    tmp_path: Path, backend: str
) -> None:
    files = write(tmp_path, f"[general]\nbackend = {backend}\n")
    with pytest.warns(UserWarning, match=r"switchml\.cfg, \[general\] backend.*shared memory"):
        assert resolve(None, {}, files).plane == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[general]\nranks = 1\n", r"\[general\] ranks: no such key; .*rank, num_workers"),
        (
            "[general]\npacket_numel = 128\n",
            r"packet_numel = 128: the value must be one of 64, 256",
        ),
        ("[general]\nbackend = tofino\n", r"must be one of shm, dummy, dpdk, rdma"),
        ("[general]\ntimeout = soon\n", r"timeout = 'soon': the value must be of type float"),
        ("[general]\nnum_workers = -1\n", r"at least 0"),
        ("[general]\ninstant_job_completion = perhaps\n", r"one of 1, true, yes"),
        (
            "[backend.dummy]\nspeed = 1\n",
            r"no such key; \[backend\.dummy\] has bandwidth, process_packets",
        ),
        ("[backend.dummy]\nbandwidth = fast\n", r"bandwidth = 'fast'"),
        ("[worker]\nrank = 1\n", r"no such section \[worker\]"),
        ("rank = 1\n", r"cannot be read"),
    ],
)
def test_errors_name_file_key_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"switchml\.cfg") as caught:
        resolve(None, {}, write(tmp_path, text))
    caught.match(message)


def test_where_the_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [path.name for path in configuration_files()]
    assert names == ["switchml.cfg", f"switchml-{socket.gethostname()}.cfg", "switchml.cfg"]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "[general]\nbackend = dummy\n")
    assert resolve(None, {}).plane == "dummy"


def test_options_have_a_field_for_every_setting() -> None:
    fields = dataclasses.fields(Aggregation)
    settings = {f.name: f"{type(f.default).__name__} | None" for f in fields}
    assert {field.name: field.type for field in dataclasses.fields(Options)} == settings


def test_wrong_options() -> None:
    with pytest.raises(TypeError, match="planes"):
        Options(planes="shm")
    with pytest.raises(ConfigError, match="one of auto, shm, dummy"):
        Options(plane="tofino")
    with pytest.raises(ConfigError, match="of type int"):
        Options(spin_us="fast")
    with pytest.raises(ConfigError, match="not dict"):
        resolve({}, {}, [])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_worker_threads = 4, max_outstanding_packets = 2"):
        resolve(Options(max_outstanding_packets=2), {}, [])
    assert repr(Options(plane="shm")) == "Options(plane='shm')"
