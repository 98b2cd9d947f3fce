"""The HTTP application without a switcher: who may call it, bodies, connections."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn

import switching_models as models
from torchrelay.config import Switching
from torchrelay.errors import CapacityError, UnavailableError
from torchrelay.switching import ModelStore, _connections, _http, _tensors
from torchrelay.switching._connections import Connection, bind
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._tensors import decode, encode, parse_body

ENTRY = ModelEntry("chain", {})


class Caller:
    """Sends requests to an application whose switcher only has not failed."""

    def __init__(self, store: ModelStore, **settings: Any) -> None:
        no_switcher: Any = SimpleNamespace(failure=None)
        self._app = _http.Application(no_switcher, store, {"chain": ENTRY}, Switching(**settings))

    async def call(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        receive: Callable[[], Awaitable[Any]] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        sent: list[dict[str, Any]] = []

        async def empty() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        given = {"host": "localhost:8000"} | (headers or {})
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        await self._app(scope, receive or empty, send)
        answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], answered, sent[1]["body"]

    def status(self, method: str, path: str, **headers: str) -> int:
        return asyncio.run(self.call(method, path, headers))[0]

    def error(self, method: str, path: str, **headers: str) -> str:
        body = json.loads(asyncio.run(self.call(method, path, headers))[2])
        assert isinstance(body["error"], str)
        return body["error"]


@pytest.fixture
def store() -> Any:
    with ModelStore() as store:
        store.add("chain", models.chain, inputs={"x": torch.ones(1, 64)})
        yield store


def test_web_pages_from_elsewhere_are_refused(store: ModelStore) -> None:
    server = Caller(store, allowed_hosts="models.example, m2.example")
    for host in (
        "localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        socket.gethostname(),
        "M2.example:80",
    ):
        assert server.status("GET", "/v2", host=host) == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[", "a b"):
        assert server.status("GET", "/v2", host=host) == 421, host
    assert Caller(store, allowed_hosts="*").status("GET", "/v2", host="evil.example") == 200
    infer = "/v2/models/none/infer"
    assert server.status("POST", infer, origin="http://localhost:8000") == 404
    for origin in ("http://evil.example", "null", "http://localhost:8001", "file://"):
        assert server.status("POST", infer, origin=origin) == 403, origin
        assert server.status("GET", "/status.json", origin=origin) == 403, origin
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; b=1"):
        assert server.status("POST", infer, **{"content-type": kind}) == 415, kind
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/octet-stream"):
        assert server.status("POST", infer, **{"content-type": kind}) == 404, kind


def test_the_key_is_asked_of_every_request_but_health(store: ModelStore) -> None:
    server = Caller(store, api_key="opens it")
    basic = base64.b64encode(b"anyone:opens it").decode()
    assert server.status("GET", "/v2/health/live") == 200
    for path in ("/", "/v2", "/metrics", "/status.json", "/v2/models/chain", "/nothing"):
        assert server.status("GET", path) == 401, path
    for wrong in ("Bearer opens", "Bearer", "opens it", "Basic !", "Digest opens it"):
        assert server.status("GET", "/v2", authorization=wrong) == 401, wrong
    for right in ("Bearer opens it", "bearer opens it", f"Basic {basic}"):
        assert server.status("GET", "/v2", authorization=right) == 200, right
    _, headers, body = asyncio.run(server.call("GET", "/v2"))
    assert "Bearer KEY" in json.loads(body)["error"]
    assert headers["www-authenticate"].startswith("Basic")  # a browser then asks for it


def test_models_are_not_loaded_or_unloaded_by_clients_unless_allowed(store: ModelStore) -> None:
    for call in ("load", "unload"):
        path = f"/v2/repository/models/chain/{call}"
        assert Caller(store).status("POST", path) == 403
        assert "--repository-control" in Caller(store).error("POST", path)
        other = path.replace("chain", "other")
        assert Caller(store, repository_control=True).status("POST", other) == 404


def test_every_error_is_json(store: ModelStore) -> None:
    server = Caller(store)
    assert server.error("GET", "/v3") == "the server has no path /v3"
    assert server.error("DELETE", "/v2") == "/v2 does not take DELETE"
    _, headers, _ = asyncio.run(server.call("DELETE", "/v2"))
    assert headers["allow"] == "GET"
    assert "no model 'none'" in server.error("GET", "/v2/models/none")
    assert server.status("HEAD", "/v2") == 200 and server.status("HEAD", "/v2/models/chain") == 200


async def half_a_body(sent: list[bytes], given_up: asyncio.Event) -> dict[str, Any]:
    if sent:
        return {"type": "http.request", "body": sent.pop(), "more_body": True}
    await given_up.wait()
    return {"type": "http.disconnect"}


def test_unfinished_bodies_take_a_bounded_memory(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it requests are refused at once; it is free again when the others are given up."""
    monkeypatch.setattr(_http, "_HEADER_BYTES", 0)
    server = Caller(store, request_bytes=1000)

    async def attack() -> list[int]:
        path, given_up = "/v2/models/chain/infer", asyncio.Event()
        receives = [partial(half_a_body, [b"x" * 900], given_up) for _ in range(6)]
        calls = [asyncio.create_task(server.call("POST", path, None, one)) for one in receives]
        await asyncio.wait(calls[4:])
        assert not any(call.done() for call in calls[:4])
        given_up.set()
        answers = await asyncio.gather(*calls)
        late = await server.call("POST", path)
        return [status for status, _, _ in (*answers, late)]

    assert asyncio.run(attack()) == [503, 503, 503, 503, 429, 429, 400]


def serve_nothing(client: Callable[[int], Awaitable[None]]) -> None:
    """Run ``client`` with the port of a server whose application answers "ok" to everything; at
    /early, before it has the body.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message: dict[str, Any] = {"type": "", "more_body": scope["path"] != "/early"}
        while message.get("more_body"):
            message = await receive()
        if message["type"] == "http.disconnect":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> None:
        with bind("127.0.0.1", 0) as listener:
            config = uvicorn.Config(app, http=Connection, lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                await client(listener.getsockname()[1])
            finally:
                server.should_exit = True
                await task

    asyncio.run(run())


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_idle_connections_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 8)

    async def client(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readuntil(b"0\r\n\r\n")
        for old, _ in idle[:13]:  # the first are those that were closed
            with contextlib.suppress(ConnectionResetError):
                assert await old.read() == b""
        for _, one in [*idle, (reader, writer)]:
            one.close()

    serve_nothing(client)


def test_heads_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connections, "REQUEST_TIMEOUT_S", 0.2)

    async def client(port: int) -> None:
        for sent in (b"", REQUEST[:20], REQUEST + REQUEST[:20]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            try:
                answer = await reader.read()  # to its end
            except ConnectionResetError:
                answer = b""
            assert answer == b"" or b"200 OK" in answer
            writer.close()

    serve_nothing(client)


def test_connections_are_closed_that_send_a_body_after_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "REQUEST_TIMEOUT_S", 0.2)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"abc")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    serve_nothing(client)


def test_a_body_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connections, "REQUEST_TIMEOUT_S", 0.2)
    half = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"

    async def client(port: int) -> None:
        for before in (b"", REQUEST):  # the first of a connection, and one that was sent ahead
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before + half)
            *answers, last = (await reader.read()).split(b"HTTP/1.1 ")[1:]
            assert [answer[:6] for answer in answers] == [b"200 OK"] * bool(before)
            head, _, body = last.partition(b"\r\n\r\n")
            assert head.startswith(b"400 Bad Request")
            assert body == b"the body did not arrive within 0.2 s"
            writer.close()

    serve_nothing(client)


def test_heads_without_a_body_are_sent() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        expecting = b"Host: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        writer.write(b"POST / HTTP/1.1\r\n" + expecting)
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"{}")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    serve_nothing(client)


def test_answers_leave_at_once() -> None:
    """Without Nagle's algorithm, which kept the second part of an answer back for 40 ms."""

    async def run() -> None:
        accepted: list[asyncio.StreamWriter] = []
        with bind("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(lambda _, w: accepted.append(w), sock=listener)
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                while not accepted:
                    await asyncio.sleep(0.01)
                theirs = accepted[0].get_extra_info("socket")
                assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                writer.close()
                accepted[0].close()

    asyncio.run(run())


def test_a_view_of_one_element_travels_in_binary() -> None:
    entries, raw = encode({"x": torch.full((1, 5), 7.0)[:, 0]}, binary=True)
    assert torch.equal(decode(entries, memoryview(raw[0]))["x"], torch.tensor([7.0]))


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UnavailableError, match=r"cannot serve on 127\.0\.0\.1.*--port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UnavailableError, match=r"cannot serve on nowhere\.invalid"):
        bind("nowhere.invalid", 0)


def test_what_is_too_large_for_json_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tensors, "_JSON_BYTES", 100)
    monkeypatch.setattr(_tensors, "_JSON_VALUES", 9)
    with pytest.raises(CapacityError, match=r"the JSON takes 101 bytes.* in binary"):
        parse_body(b" " * 101, None)
    assert parse_body(b"{}" + b" " * 200, "2")[0] == {}
    with pytest.raises(CapacityError, match=r"'x' has 10 values.*parameter binary_data"):
        encode({"x": torch.ones(10)}, binary=False)
    assert len(encode({"x": torch.ones(10)}, binary=True)[1][0]) == 40
