"""An S3-compatible server for tests."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchrelay.checkpoint.engine._background import saver

__all__ = ["s3_bucket"]


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on a server of its own, which child processes find by the environment."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs", reason="needs s3fs")
    moto_server = pytest.importorskip("moto.server", reason="needs moto, flask and flask-cors")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    # Its buckets outlive it, in this process.
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield "s3://bucket"
    saver.close()
    fs.clear_instance_cache()
    server.stop()
