"""A client of the server, over the standard library's HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import ssl
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import torch

from torchrelay._resource import Resource
from torchrelay.errors import (
    ArgumentError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
    from_json,
)
from torchrelay.switching.models._tensors import (
    HEADER,
    TensorEntry,
    check_tensors,
    decode,
    encode,
    split_body,
)

__all__ = ["Client"]

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _start_again() -> None:
    for one in [*_clients]:
        one._start_again()


os.register_at_fork(after_in_child=_start_again)


class Client(Resource):
    """Calls models of a server that speaks the Open Inference Protocol v2. Thread-safe; one call at
    a time.

    Tensors travel in binary. The server's errors are raised as the same types here. In a process
    forked from the client's, it connects anew.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str = "",
        timeout_s: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Connect at the first call.

        Args:
            api_key: the server's key, if it has one.
            timeout_s: the most to wait for the server's answer.
            ssl_context: for an ``https`` URL; default: the system's authorities.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError(
                f"{url!r} is not the address of a server; write http://HOST:PORT, or https:// if "
                "it serves TLS"
            )
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        kind: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            kind = partial(http.client.HTTPSConnection, context=ssl_context)
        self._connect = partial(kind, parts.hostname, parts.port, timeout=timeout_s)
        self._connection = self._connect()
        self._lock = threading.Lock()
        _clients.add(self)

    def infer(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the model's outputs by name. Blocks.

        Raises:
            NotFoundError, ModelError, OverloadedError, ...: as :meth:`Switcher.submit`.
            OperationTimeoutError: the server did not answer within ``timeout_s``.
            PeerLostError: the server cannot be reached.
        """
        check_tensors(inputs)
        entries, raw = encode(inputs, binary=True)
        parameters: dict[str, Any] = {"binary_data_output": True}
        if priority:
            parameters["priority"] = priority
        if deadline_s is not None and deadline_s != math.inf:
            if not deadline_s >= 0:
                raise ArgumentError(f"deadline_s={deadline_s}: it must be a number of seconds >= 0")
            parameters["timeout"] = max(1, int(deadline_s * 1e6))  # 0 is no limit
        header = json.dumps({"inputs": entries, "parameters": parameters}).encode()
        path = f"/v2/models/{quote(name, safe='')}/infer"
        headers = {HEADER: str(len(header)), "Content-Type": "application/octet-stream"}
        body, length = self._request("POST", path, b"".join([header, *raw]), headers)
        text, rest = split_body(body, length)
        return decode(_entries(bytes(text)), rest)

    def models(self) -> dict[str, str]:
        """Return the state ("READY", "LOADING", "UNAVAILABLE") of every model the server knows."""
        return {one["name"]: one["state"] for one in self._json("POST", "/v2/repository/index")}

    def metadata(self, name: str) -> dict[str, Any]:
        """Return the model's versions, inputs and outputs."""
        return dict(self._json("GET", f"/v2/models/{quote(name, safe='')}"))

    def load(self, name: str) -> None:
        """Load a model of the server's models file; blocks until it is ready. The server must allow
        it: ``--repository-control``.
        """
        self._json("POST", f"/v2/repository/models/{quote(name, safe='')}/load")

    def unload(self, name: str) -> None:
        """Unload a model."""
        self._json("POST", f"/v2/repository/models/{quote(name, safe='')}/unload")

    def status(self) -> dict[str, Any]:
        """Return what the status page shows."""
        return dict(self._json("GET", "/status.json"))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._connection.close()

    def _json(self, method: str, path: str) -> Any:
        return json.loads(self._request(method, path, b"", {})[0])

    def _request(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[bytes, str | None]:
        with self._lock, contextlib.ExitStack() as undo:
            # Until the answer is read, the next call cannot use the connection.
            undo.callback(self._connection.close)
            try:
                response = self._response(method, path, body, headers | self._headers)
                data = response.read()
            except TimeoutError as error:
                raise OperationTimeoutError(
                    f"{self.url} did not answer within {self._timeout_s:g} s"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise PeerLostError(
                    f"{self.url} cannot be reached: {error!r}; is the server running?"
                ) from error
            undo.pop_all()
        if response.status >= 400:
            raise _error(response.status, data)
        return data, response.headers.get(HEADER)

    def _start_again(self) -> None:
        """Leave the connection to the process that this one was forked from."""
        # Closing the connection itself might wait for a lock that a thread of the parent held.
        if self._connection.sock is not None:
            os.close(self._connection.sock.detach())
        self._connection, self._lock = self._connect(), threading.Lock()

    def _response(self, *request: Any) -> http.client.HTTPResponse:
        is_new = self._connection.sock is None
        while True:
            try:
                self._connection.request(*request)
                return self._connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # The server closes idle connections; nothing was answered on this one.
                self._connection.close()
                if is_new:
                    raise
                is_new = True


def _entries(text: bytes) -> list[TensorEntry]:
    """Return the tensors that the JSON of an answer describes."""
    try:
        return [
            TensorEntry(
                one["name"],
                one["datatype"],
                list(map(int, one["shape"])),
                one.get("data"),
                (one.get("parameters") or {}).get("binary_data_size"),
            )
            for one in json.loads(text)["outputs"]
        ]
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"the server's answer is not of the Open Inference Protocol: {text[:200]!r}"
        ) from error


def _error(status: int, data: bytes) -> TorchRelayError:
    try:
        answer = json.loads(data)
        return from_json({"type": answer["type"], "message": answer["error"]}, ModelError)
    except (ValueError, KeyError, TypeError):
        kind = {401: UnavailableError, 403: UnavailableError, 404: NotFoundError}.get(
            status, ModelError
        )
        return kind(f"the server answered {status}: {data[:200].decode(errors='replace')}")
