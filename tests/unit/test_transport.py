from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed import HashStore

from torchrelay import _native
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    UnavailableError,
)
from torchrelay.transport import (
    TransportSettings,
    create_key_file,
    plain_network,
    read_key_file,
    session_token,
    zmq_library_path,
)

SETTINGS = TransportSettings(heartbeat_s=0.2, peer_timeout_s=30)
TOKEN = bytes(16)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    create_key_file(path)
    public, secret = read_key_file(path)
    assert len(public) == len(secret) == 40 and public != secret
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_key_file(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key_file(path)
    for content in ("", "a b", "\xff\xfe"):
        bad = tmp_path / "bad"
        bad.write_text(content)
        bad.chmod(0o600)
        with pytest.raises(ConfigError):
            read_key_file(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "missing")


def test_plain_sockets_and_keys_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="do not encrypt"):
        plain_network(TransportSettings(key_file="keys"), token=TOKEN)


def test_the_token_is_drawn_by_node_0() -> None:
    store = HashStore()
    token = session_token(store, 0)
    assert len(token) == 16 and session_token(store, 1) == token
    with pytest.raises(OperationTimeoutError, match="node 0 did not write"):
        session_token(store, 1, "another name", timeout_s=0.01)
    with pytest.raises(ArgumentError, match="16 bytes"):
        _native.ZmqNetwork(zmq_library_path(), token=b"short")


def test_the_library_is_found_and_a_foreign_one_refused() -> None:
    assert os.path.exists(zmq_library_path())
    with pytest.raises(UnavailableError):
        _native.ZmqNetwork("libm.so.6", token=TOKEN)
