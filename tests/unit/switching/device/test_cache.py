"""The shared cache on the CPU: regions, sending to threads and processes, refusals."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import preloaded
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    OperationTimeoutError,
    ProtocolError,
    SegmentError,
    TorchRelayError,
)
from torchrelay.switching import ModelStore, SharedCache
from torchrelay.switching.device._host import HostMemory
from waiting import eventually

SIZE = 1 << 20


def send_in_thread(cache: SharedCache, address: Path, **kwargs: bool) -> threading.Thread:
    thread = threading.Thread(
        target=cache.send, args=(address,), kwargs={"timeout_s": 60, **kwargs}
    )
    thread.start()
    return thread


def is_private(address: Path) -> bool:
    """Whether the socket is there, for this user only."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(address.stat().st_mode) == 0o600
    return False


def test_what_one_process_writes_another_reads_and_a_reader_cannot_write(tmp_path: Path) -> None:
    program = """
import sys, torch
from torchrelay.switching import ModelStore, SharedCache
cache = SharedCache.recv(sys.argv[1])
values = cache.tensor((4,), torch.float32, 512)
if cache.read_only:
    print(values.tolist(), flush=True)
    values.zero_()  # SIGSEGV
values.mul_(2)
"""
    with SharedCache.allocate(SIZE) as cache:
        values = cache.tensor((4,), torch.float32, 512)
        values.copy_(torch.arange(4.0))
        for read_only, code in ((False, 0), (True, -11)):
            address = tmp_path / "cache.sock"
            sender = send_in_thread(cache, address, read_only=read_only)
            done = subprocess.run(
                [preloaded.python(), "-c", program, str(address)],
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            sender.join()
            assert done.returncode == code, done.stderr
            assert values.tolist() == [0.0, 2.0, 4.0, 6.0]
            assert not address.exists()
    assert "[0.0, 2.0, 4.0, 6.0]" in done.stdout


def test_a_read_only_descriptor_cannot_be_mapped_writable() -> None:
    with SharedCache.allocate(SIZE) as cache:
        descriptor = cache.export(read_only=True)
        try:
            with pytest.raises(SegmentError):
                HostMemory.open(descriptor, read_only=False)
            described = cache.describe(read_only=True)
            again = SharedCache.from_descriptors(described, [descriptor]).export()
            with pytest.raises(SegmentError):
                HostMemory.open(again, read_only=False)
            os.close(again)
        finally:
            os.close(descriptor)


def test_the_socket_is_for_this_user_only_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    address = tmp_path / "cache.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(address))
    with SharedCache.allocate(SIZE) as cache:
        sender = send_in_thread(cache, address)
        eventually(lambda: is_private(address))
        received = SharedCache.recv(address, timeout_s=60)
        sender.join()
        assert received.size_bytes == SIZE and not received.read_only
        received.close()


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(60)
    connection.connect(sys.argv[1])
    print(len(connection.recv(4096)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_another_user_gets_nothing_even_where_the_socket_lets_him_connect() -> None:
    with tempfile.TemporaryDirectory() as folder, SharedCache.allocate(SIZE) as cache:
        Path(folder).chmod(0o755)
        address = Path(folder) / "cache.sock"
        sender = send_in_thread(cache, address)
        eventually(lambda: is_private(address))
        codes = []
        for mode in (0o600, 0o666):
            address.chmod(mode)
            command = ["/usr/bin/env", "python3", "-c", STRANGER, str(address)]
            done = subprocess.run(
                command, user=65534, capture_output=True, text=True, check=False, timeout=100
            )
            codes.append((done.stdout.strip(), "PermissionError" in done.stderr))
        assert codes == [("", True), ("0", False)]
        received = SharedCache.recv(address, timeout_s=60)  # the stranger took nobody's place
        sender.join()
        received.close()


def test_caches_and_stores_cannot_be_pickled() -> None:
    with SharedCache.allocate(SIZE) as cache, ModelStore() as store:
        for value in (cache, store):
            with pytest.raises(TypeError, match="cannot pickle"):
                pickle.dumps(value)


def test_what_cannot_be_sent_or_received_raises(tmp_path: Path) -> None:
    address = tmp_path / "cache.sock"
    with SharedCache.allocate(SIZE) as cache:
        with pytest.raises(OperationTimeoutError, match="no process received"):
            cache.send(address, timeout_s=0.05)
        assert not address.exists()
        with pytest.raises(OperationTimeoutError, match="no shared cache was sent"):
            SharedCache.recv(address, timeout_s=0.05)
        address.write_text("")
        with pytest.raises(ArgumentError, match="not a socket"):
            cache.send(address)
        with pytest.raises(ArgumentError, match="cannot listen"):
            cache.send(tmp_path / ("x" * 200))
        address.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(address))
            other.listen()
            with pytest.raises(ArgumentError, match="another process listens"):
                cache.send(address)


def test_a_process_that_was_not_accepted_waits_for_the_next_sender(tmp_path: Path) -> None:
    address, received = tmp_path / "cache.sock", list[SharedCache]()
    thread = threading.Thread(target=lambda: received.append(SharedCache.recv(address)))
    with SharedCache.allocate(SIZE) as cache:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(address))
            other.listen()
            thread.start()
            assert select.select([other], [], [], 60)[0]  # it has connected
        address.unlink()
        cache.send(address)
        thread.join()
        received[0].close()


@pytest.mark.parametrize(
    "data", [b"", b"\0\0", b"\0\0\0\x02{}", b"\xff\xff\xff\xffgarbage", b"\0\0\0\x05notjs"]
)
def test_a_sender_of_nonsense_is_a_protocol_error(tmp_path: Path, data: bytes) -> None:
    address = tmp_path / "cache.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(address))
        other.listen()

        def serve() -> None:
            connection = other.accept()[0]
            connection.sendall(data)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TorchRelayError) as caught:
            SharedCache.recv(address, timeout_s=60)
        thread.join()
    assert isinstance(caught.value, ProtocolError)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(20):
        with SharedCache.allocate(SIZE) as cache:
            sender = send_in_thread(cache, tmp_path / "cache.sock")
            received = SharedCache.recv(tmp_path / "cache.sock", timeout_s=60)
            sender.join()
            received.close()
            with pytest.raises(OperationTimeoutError):
                cache.send(tmp_path / "cache.sock", timeout_s=0.001)
    assert descriptors() == before


def test_regions_hand_out_aligned_tensors_until_they_are_full() -> None:
    with SharedCache.allocate(SIZE) as cache:
        region = cache.insert_for_parameter(4096, 512)
        one, other = region.empty((3,)), region.empty((5,), torch.int8)
        assert one.data_ptr() % 512 == other.data_ptr() % 512 == 0
        assert other.data_ptr() - one.data_ptr() == 512
        with pytest.raises(CapacityError, match="do not fit the parameter region"):
            region.empty((1024,))
        region.reset()
        assert region.empty((1,)).data_ptr() == one.data_ptr()


def test_regions_do_not_overlap_and_clear_makes_way() -> None:
    with SharedCache.allocate(SIZE) as cache:
        cache.insert_for_parameter(4096, 0)
        cache.insert_for_computation(4096, 4096)
        for size_bytes, offset_bytes in (
            (1, 4095 // 512 * 512),
            (SIZE + 1, 0),
            (0, 8192),
            (10, 8193),
            (1, -512),
        ):
            with pytest.raises(ArgumentError):
                cache.insert_for_computation(size_bytes, offset_bytes)
        with pytest.raises(ArgumentError, match="overlaps"):
            cache.insert_for_computation(SIZE, 0)
        cache.clear()
        cache.insert_for_computation(SIZE, 0)


def test_a_module_moves_into_a_region_with_its_ties() -> None:
    with SharedCache.allocate(SIZE) as cache:
        region = cache.insert_for_parameter(SIZE // 2, 0)
        module = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.LSTM(8, 8), torch.nn.Linear(8, 8)
        )
        module[2].weight = module[0].weight
        weight, x = module[0].weight, torch.randn(3, 8)
        expected = module[2](module[1](module[0](x))[0])
        region.put(module)
        assert module[0].weight is weight is module[2].weight
        assert torch.equal(module[2](module[1](module[0](x))[0]), expected)
        start = cache.tensor((1,), torch.uint8).data_ptr()
        assert all(start <= p.data_ptr() < start + SIZE // 2 for p in module.parameters())
        with pytest.raises(CapacityError, match="a module of"):
            region.put(torch.nn.Linear(1000, 1000))


def test_tensors_outlive_the_cache_and_a_closed_cache_is_refused() -> None:
    cache = SharedCache.allocate(SIZE)
    kept = cache.tensor((4,), torch.float32).fill_(7)
    cache.close()
    cache.close()
    assert kept.tolist() == [7.0] * 4
    with pytest.raises(ArgumentError, match="closed"):
        cache.tensor((1,), torch.float32)


def test_sizes_devices_and_shapes_are_checked() -> None:
    with pytest.raises(ArgumentError, match="at least 1 byte"):
        SharedCache.allocate(0)
    with pytest.raises(ArgumentError, match="device = meta: the choices are auto, cpu and cuda"):
        SharedCache.allocate(SIZE, "meta")
    with pytest.raises(SegmentError, match="choose a smaller size"):
        SharedCache.allocate(1 << 50)
    with SharedCache.allocate(SIZE) as cache, pytest.raises(ArgumentError, match="does not fit"):
        cache.tensor((SIZE,), torch.float32)
