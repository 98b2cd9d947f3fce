"""The recipe of docs/recipes.md: a key, and a proxy with TLS in front of `torchrelay serve`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import preloaded
from torchrelay.errors import TorchRelayError
from torchrelay.switching import Client

# The server starts processes that import torch: minutes where many others run.
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]
NAME, KEY = "models.example.com", "a long random string"
FILE = f"""
[server]
port = 0
arena_bytes = 1_000_000
request_bytes = 1_000_000
allowed_hosts = "{NAME}"

[models.linear]
factory = "torch.nn:Linear"
kwargs = {{ in_features = 4, out_features = 2 }}
inputs = [{{ name = "input", datatype = "FP32", shape = [-1, 4] }}]
"""


@contextlib.contextmanager
def _served(folder: Path, more: str = "") -> Iterator[int]:
    """A server with a key; its port."""
    (folder / "models.toml").write_text(FILE.replace("[server]", f"[server]\n{more}"))
    code = "from torchrelay.cli import main; main()"
    command = [preloaded.python(), "-c", code, "serve", str(folder / "models.toml")]
    environ = {**os.environ, "TORCHRELAY_SWITCHING_API_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if line.startswith("serving on "):
                    yield int(line.rsplit(":", 1)[1].strip("/\n"))
                    break
        finally:
            server.send_signal(signal.SIGTERM)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for NAME, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={NAME}"]
    command += ["-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def _proxy(folder: Path, backend: int) -> Iterator[int]:
    """A proxy that ends TLS and passes bytes on; its port."""
    certificate, key = _certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_accept, args=(listener, context, backend))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _accept(listener: socket.socket, context: ssl.SSLContext, backend: int) -> None:
    with contextlib.ExitStack() as stack:
        pipes = []
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:  # the listener is closed
                break
            try:
                client = stack.enter_context(context.wrap_socket(plain, server_side=True))
            except ssl.SSLError:  # one that does not trust the certificate
                continue
            server = stack.enter_context(socket.create_connection(("127.0.0.1", backend)))
            for source, target in ((client, server), (server, client)):
                pipes.append(threading.Thread(target=_copy, args=(source, target)))
                pipes[-1].start()
        for pipe in pipes:
            pipe.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def _resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def local(host: Any, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host == NAME else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local)


def test_tls_by_option(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    files = f'tls_certificate = "{certificate}"\ntls_key = "{key}"'
    with _served(tmp_path, files) as port:
        trusted = ssl.create_default_context(cafile=str(certificate))
        url = f"https://{NAME}:{port}"
        with Client(url, api_key=KEY, ssl_context=trusted, timeout_s=100) as client:
            for _ in range(3):
                assert client.infer("linear", {"input": torch.ones(3, 4)})["output"].shape == (3, 2)
        with (
            Client(url.replace("https", "http"), api_key=KEY, timeout_s=100) as client,
            pytest.raises(TorchRelayError, match="cannot be reached"),
        ):
            client.models()


def test_tls_and_a_key(tmp_path: Path) -> None:
    with _served(tmp_path) as backend, _proxy(tmp_path, backend) as port:
        url = f"https://{NAME}:{port}"
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        x = torch.ones(3, 4)
        with Client(url, api_key=KEY, ssl_context=trusted, timeout_s=100) as client:
            assert client.infer("linear", {"input": x})["output"].shape == (3, 2)
        with (
            Client(url, ssl_context=trusted, timeout_s=100) as client,
            pytest.raises(TorchRelayError, match="key"),
        ):
            client.infer("linear", {"input": x})
        with (
            Client(url, api_key=KEY, timeout_s=100) as client,
            pytest.raises(TorchRelayError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.infer("linear", {"input": x})
