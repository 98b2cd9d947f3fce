"""The HTTP application without a switcher: who may call it, bodies, connections."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import switching_models as models
from torchrelay.config import Switching
from torchrelay.errors import CapacityError, UnavailableError
from torchrelay.switching import ModelStore, _connections, _http, _tensors
from torchrelay.switching._connections import (
    HttpError,
    HttpRequest,
    HttpResponse,
    HttpServer,
    bind,
)
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._tensors import decode, encode, parse_body

ENTRY = ModelEntry("chain", {})


class Caller:
    """Sends requests to an application whose switcher only has not failed."""

    def __init__(self, store: ModelStore, **settings: Any) -> None:
        no_switcher: Any = SimpleNamespace(failure=None)
        self.app = _http.Application(no_switcher, store, {"chain": ENTRY}, Switching(**settings))

    def call(self, method: str, path: str, headers: dict[str, str] | None = None) -> HttpResponse:
        given = {"host": "localhost:8000"} | (headers or {})
        request = HttpRequest(method, path, given)
        responses: list[HttpResponse] = []
        try:
            self.app.check(request)
        except HttpError as error:
            return self.app.error(request, error)
        self.app.answer(request, responses.append)
        return responses[0]

    def status(self, method: str, path: str, **headers: str) -> int:
        return self.call(method, path, headers).status

    def error(self, method: str, path: str, **headers: str) -> str:
        body = json.loads(self.call(method, path, headers).body)
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
    response = server.call("GET", "/v2")
    assert "Bearer KEY" in json.loads(response.body)["error"]
    assert response.headers["WWW-Authenticate"].startswith("Basic")  # a browser then asks for it


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
    assert server.error("DELETE", "/v2") == "/v2 does not accept DELETE"
    assert server.call("DELETE", "/v2").headers["Allow"] == "GET"
    assert "no model 'none'" in server.error("GET", "/v2/models/none")
    assert server.status("HEAD", "/v2") == 200 and server.status("HEAD", "/v2/models/chain") == 200


def test_unfinished_bodies_take_a_bounded_memory(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it requests are refused at once; it is free again when the others are given up."""
    monkeypatch.setattr(_http, "_HEADER_BYTES", 0)
    app = Caller(store, request_bytes=1000).app
    head = b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"

    async def client(port: int) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(7)]
        for _, writer in opened[:4]:
            writer.write(head % 1000 + b"x" * 900)
        await asyncio.sleep(0.2)
        for reader, writer in opened[4:6]:
            writer.write(head % 1000 + b"x" * 900)
            assert b"429 Too Many Requests" in await reader.readuntil(b"\r\n\r\n")
        reader, writer = opened[6]
        writer.write(head % 1001 + b"x" * 1001)  # the four still take their memory
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"413" in answer or b"429" in answer
        for _, one in opened:
            one.close()
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % 900 + b"x" * 900)
        assert b"400 Bad Request" in await reader.readuntil(b"\r\n\r\n")  # read, and no JSON
        writer.close()

    serve(app, client)


LARGE = bytes(32 << 20)


class Ok:
    """An application that answers "ok" to everything; at /early, before it has the body; at /large
    much.
    """

    max_body_bytes = 1000

    def check(self, request: HttpRequest) -> None:
        if request.path == "/early":
            raise HttpError(200, "ok")

    def error(self, request: HttpRequest, error: Exception) -> HttpResponse:
        status = error.status if isinstance(error, HttpError) else 500
        return HttpResponse(str(error).encode(), status)

    def answer(
        self, request: HttpRequest, respond: Callable[[HttpResponse], object]
    ) -> Future[Any] | None:
        respond(HttpResponse(LARGE if request.path == "/large" else b"ok"))
        return None


def serve(app: Any, client: Callable[[int], Awaitable[None]]) -> None:
    """Run ``client`` with the port of a server of `app`."""

    async def run() -> None:
        with bind("127.0.0.1", 0) as listener:
            started = asyncio.Event()
            server = HttpServer(app, 10.0, started.set, lambda: False)
            task = asyncio.create_task(server.serve(listener))
            await started.wait()
            try:
                await client(listener.getsockname()[1])
            finally:
                server.is_ending = True
                await task

    asyncio.run(run())


def serve_nothing(client: Callable[[int], Awaitable[None]]) -> None:
    serve(Ok(), client)


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_idle_connections_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 8)

    async def client(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"ok"
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
        assert await reader.readexactly(2) == b"ok"
        writer.write(b"abc")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    serve_nothing(client)


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"])
def test_clients_that_stop_reading_are_given_up(
    monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    monkeypatch.setattr(_connections, "REQUEST_TIMEOUT_S", 0.2)
    lost = asyncio.Event()
    end = _connections.Connection.connection_lost

    def end_and_note(connection: Any, error: Exception | None) -> None:
        end(connection, error)
        lost.set()

    monkeypatch.setattr(_connections.Connection, "connection_lost", end_and_note)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n" + last + b"\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await lost.wait()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(len(LARGE))
        writer.close()

    serve_nothing(client)


def test_clients_that_read_slowly_are_not_given_up() -> None:
    unsent, aborted = [900, 500, 500], []
    transport: Any = SimpleNamespace(
        get_write_buffer_size=lambda: unsent.pop(0),
        is_closing=lambda: True,
        abort=lambda: aborted.append(len(unsent)),
    )
    connection = _connections.Connection(HttpServer(Ok(), 10.0, lambda: None, lambda: False))  # type: ignore[arg-type]
    connection.transport = transport
    for _ in range(3):
        connection.give_up()
    assert aborted == [0]  # only when nothing more had been read


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
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in answer and b"Content-Length: 2" in answer
        expecting = b"Host: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        writer.write(b"POST / HTTP/1.1\r\n" + expecting)
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"{}")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    serve_nothing(client)


def test_what_is_sent_ahead_is_answered_in_order() -> None:
    """More at once than calls may nest, and none before the client reads."""

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST * 5000 + REQUEST.replace(b" / ", b" /early ") + REQUEST)
        for _ in range(5002):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"ok"
        writer.close()

    serve_nothing(client)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: what\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, b"431"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokx", b"400"),
        (REQUEST + b"\0\0", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"200"),
    ],
)
def test_connections_are_closed_on_which_no_more_can_be_read(sent: bytes, status: bytes) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        assert answers[-1].startswith(status) and b"Connection: close" in answers[-1]
        assert len(answers) == 1 + sent.startswith(REQUEST)
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
