from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import pytest

from torchrelay import _native, transport
from torchrelay.config import TransportSettings
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError

TOKEN = bytes(16)
KEY = "0123456789abcdefABCDEF9876543210" * 2


def _read(path: Path) -> bytes | None:
    return transport.read_key(TransportSettings(key_file=str(path)))


def test_a_key_comes_from_a_file_or_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "key"
    transport.create_key(path)
    key = _read(path)
    assert key is not None and len(key) == 32 and key.hex() == path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        transport.create_key(path)
    assert transport.read_key(TransportSettings()) is None
    assert transport.read_key(TransportSettings(key=KEY)) == bytes.fromhex(KEY)
    with pytest.raises(ConfigError, match="not both"):
        transport.read_key(TransportSettings(key=KEY, key_file=str(path)))


def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for text in ("", "secret", KEY[:-1], KEY + "0", "\xff\xfe"):
        path.write_text(text, encoding="latin-1")
        path.chmod(0o600)
        if text:
            with pytest.raises(ConfigError) as variable:
                transport.read_key(TransportSettings(key=text))
            assert text not in str(variable.value)
        with pytest.raises(ConfigError, match=str(path)) as file:
            _read(path)
        assert not text or text not in str(file.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        _read(tmp_path / "missing")
    assert KEY not in repr(TransportSettings(key=KEY))


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o604, 0o620, 0o640, 0o660, 0o644, 0o602])
@pytest.mark.parametrize("owner", ["root", "user"])
def test_a_key_file_is_its_owners_alone_or_roots_with_a_group_that_reads_it(
    tmp_path: Path, mode: int, owner: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to change the owner of a file")
    path = tmp_path / "key"
    transport.create_key(path)
    os.chown(path, 0 if owner == "root" else 1000, -1)
    path.chmod(mode)
    if not mode & (0o027 if owner == "root" else 0o077):
        assert _read(path)
    else:
        with pytest.raises(ConfigError, match=r"chmod 600.*defaultMode: 0440"):
            _read(path)


def test_keys_are_compared_without_being_shown() -> None:
    one, other = transport.key_name(bytes(32)), transport.key_name(bytes([1] * 32))
    assert one != other and len(one) == len(other) == 12
    assert transport.key_name(None) == "none"


def test_the_library_is_found_and_a_foreign_one_refused() -> None:
    _native.Tls(transport.libssl_path(), bytes(32))
    for path in ("libm.so.6", "libno-such-library.so"):
        with pytest.raises(UnavailableError, match="apt install libssl3"):
            _native.Tls(path, bytes(32))
    with pytest.raises(ArgumentError, match="32 bytes"):
        _native.Tls(transport.libssl_path(), b"short")
    with pytest.raises(ArgumentError, match="16 bytes"):
        _native.TcpNetwork(token=b"short")


def test_a_library_that_is_not_openssl_3_is_not_taken(tmp_path: Path) -> None:
    """Of several that a process has mapped, as by packages with an OpenSSL of their own."""
    with contextlib.ExitStack() as stack:
        for name in ("libssl3.so", "libssl-0.so.1.1", os.fsdecode(b"\xff.so")):
            file = stack.enter_context((tmp_path / name).open("w+b"))
            file.truncate(1 << 30)  # so that it lies before the others, in which it does not fit
            stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        path = transport.libssl_path()
        assert not path.startswith(str(tmp_path))
        _native.Tls(path, bytes(32))


def test_messages_of_endpoints_with_a_key() -> None:
    settings = TransportSettings(key=KEY, local_sockets=False)
    network = transport.network(settings, token=TOKEN)
    receiver, sender = network.open("receiver"), network.open("sender")
    sender.connect(0, receiver.address)
    sender.send(0, b"hello", memoryview(b" again"))
    assert bytes(receiver.receive(30) or b"") == b"hello again"
