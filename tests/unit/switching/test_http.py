"""The HTTP application without a switcher: who may call it, bodies, connections."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import json
import resource
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import switching_models as models
from torchrelay.config import Switching
from torchrelay.errors import ArgumentError, CapacityError, ModelError, UnavailableError
from torchrelay.switching import ModelStore, Reply, _connections, _http, _tensors
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
        switcher: Any = SimpleNamespace(
            failure=None, stored=lambda name: None, outputs=lambda name: ()
        )
        self.app = _http.Application(switcher, store, {"chain": ENTRY}, Switching(**settings))
        self.switcher = switcher

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
    for origin in ("http://evil.example", "null", "http://localhost:8001", "file://", "http://["):
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
    for wrong in ("Bearer opens", "Bearer", "opens it", "Basic !", "Basic é", "Digest opens it"):
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


def test_versions_are_those_that_are_served(store: ModelStore) -> None:
    """Not those of a store that has a newer one, which is not loaded or could not be."""
    caller = Caller(store)
    caller.switcher.stored = {"chain": store.get("chain")}.get
    caller.switcher.is_ready = lambda name: True
    caller.switcher.failure_of = lambda name: None
    caller.switcher.models = lambda: ("chain",)
    store.add("chain", models.chain, inputs={"x": torch.ones(1, 64)}, replace=True)
    path = "/v2/models/chain/versions/"
    for end in ("", "/ready"):
        assert caller.status("GET", path + "1" + end) == 200
        assert caller.error("GET", path + "2" + end) == "model 'chain' has version 1, not 2"
    assert json.loads(caller.call("GET", "/v2/models/chain").body)["versions"] == ["1"]
    assert json.loads(caller.call("POST", "/v2/repository/index").body)[0]["version"] == "1"
    assert caller.status("POST", path + "2/infer") == 404


def test_a_model_that_failed_is_not_loading(store: ModelStore) -> None:
    caller = Caller(store)
    caller.switcher.models = lambda: ("chain",)
    caller.switcher.is_ready = lambda name: False
    for error, state in ((None, "LOADING"), (ModelError("no such layer"), "UNAVAILABLE")):
        caller.switcher.failure_of = {"chain": error}.get
        (entry,) = json.loads(caller.call("POST", "/v2/repository/index").body)
        assert (entry["state"], entry["reason"]) == (state, str(error or ""))


def test_a_reply_of_another_version_is_not_sent(store: ModelStore) -> None:
    """If the model is loaded again between the arrival of a request and its start."""
    caller = Caller(store)
    reply: Future[Reply] = Future()
    reply.set_result(Reply("chain", 2, {"output": torch.ones(1)}, 0.0, 0.0, 0.0, 0))
    caller.switcher.submit = lambda name, inputs, **options: reply

    async def ask(version: str) -> HttpResponse:
        path, responses = f"/v2/models/chain{version}/infer", list[HttpResponse]()
        request = HttpRequest("POST", path, body=bytearray(b'{"inputs": []}'))
        caller.app.answer(request, responses.append)
        return responses[0]

    refused = asyncio.run(ask("/versions/1"))
    assert refused.status == 404
    assert json.loads(refused.body)["error"] == "model 'chain' has version 2, not 1"
    assert json.loads(asyncio.run(ask("")).body)["model_version"] == "2"


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
    """Beyond it large ones are refused at once; it is free again when the others are given up."""
    monkeypatch.setattr(_http, "_HEADER_BYTES", 0)
    monkeypatch.setattr(_connections, "_SMALL_BODY_BYTES", 100)
    app = Caller(store, request_bytes=1000).app
    head = b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"

    async def client(port: int) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for _, writer in opened[:8]:
            writer.write(head % 1000 + b"x" * 900)
        await asyncio.sleep(0.2)
        for reader, writer in opened[8:10]:
            writer.write(head % 1000 + b"x" * 900)
            assert b"429 Too Many Requests" in await reader.readuntil(b"\r\n\r\n")
        reader, writer = opened[11]
        writer.write(head % 100 + b"x" * 100)
        assert b"400 Bad Request" in await reader.readuntil(b"\r\n\r\n")  # read, and no JSON
        reader, writer = opened[10]
        writer.write(head % 1001 + b"x" * 1001)  # the eight still take their memory
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
    """An application that answers "ok" to everything: at /early, before it has the body; at /later,
    when the test calls what `later` holds. At /large it sends much, at /echo the request.
    """

    max_body_bytes = 1000

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.later: asyncio.Queue[Callable[[HttpResponse], object]] = asyncio.Queue()

    def check(self, request: HttpRequest) -> None:
        if request.path == "/early":
            raise HttpError(200, "ok")

    def error(self, request: HttpRequest, error: Exception) -> HttpResponse:
        status = error.status if isinstance(error, HttpError) else 500
        return HttpResponse(str(error).encode(), status)

    def answer(
        self, request: HttpRequest, respond: Callable[[HttpResponse], object]
    ) -> Future[Any] | None:
        self.paths.append(request.path)
        if request.path == "/later":
            self.later.put_nowait(respond)
            return Future()
        echo = repr((request.method, request.headers, bytes(request.body))).encode()
        respond(HttpResponse({"/large": LARGE, "/echo": echo}.get(request.path, b"ok")))
        return None


def serve(
    app: Any,
    client: Callable[[int], Awaitable[asyncio.Task[None] | None]],
    *,
    grace_s: float = 10.0,
    send_buffer: int | None = None,
) -> None:
    """Run ``client`` with the port of a server of `app`, then end the server, then await the task
    that ``client`` returned, if any.
    """

    async def run() -> None:
        with bind("127.0.0.1", 0) as listener:
            if send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            started = asyncio.Event()
            server = HttpServer(app, grace_s, started.set, lambda: False)
            task = asyncio.create_task(server.serve(listener))
            await started.wait()
            try:
                last = await client(listener.getsockname()[1])
            finally:
                server.is_ending = True
                await task
            if last is not None:
                await last

    asyncio.run(run())


def serve_nothing(client: Callable[[int], Awaitable[None]]) -> None:
    serve(Ok(), client)


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_requests_that_are_not_answered_take_a_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "_SMALL_BODY_BYTES", 100)
    app = Ok()

    async def client(port: int) -> None:
        async def send() -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(b"POST /later HTTP/1.1\r\nContent-Length: 900\r\n\r\n" + b"x" * 900)
            return reader

        writers: list[asyncio.StreamWriter] = []
        for _ in range(8):
            await send()
            respond = await app.later.get()
        refused = await send()
        assert b"500" in await asyncio.wait_for(refused.readuntil(b"\r\n\r\n"), 60)
        respond(HttpResponse(b"ok"))
        await send()
        await asyncio.wait_for(app.later.get(), 60)
        for writer in writers:
            writer.close()

    serve(app, client)


def test_answers_that_clients_do_not_read_take_a_bounded_memory() -> None:
    large = REQUEST.replace(b" / ", b" /large ")

    async def client(port: int) -> None:
        (deaf, other), (reader, writer) = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(2)
        ]
        other.write(large)
        assert b"200 OK" in await deaf.readuntil(b"\r\n\r\n")
        for request, status in ((large, b"500"), (REQUEST, b"200")):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert status in head
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split()[0]))
        assert await deaf.readexactly(len(LARGE)) == LARGE
        writer.write(large)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(LARGE)) == LARGE
        for one in (other, writer):
            one.close()

    serve_nothing(client)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a connection has ended; clients have 0.2 s for each request."""
    monkeypatch.setattr(_connections, "REQUEST_TIMEOUT_S", 0.2)
    lost = asyncio.Event()
    end = _connections.Connection.connection_lost

    def end_and_note(connection: Any, error: Exception | None) -> None:
        end(connection, error)
        lost.set()

    monkeypatch.setattr(_connections.Connection, "connection_lost", end_and_note)
    return lost


@pytest.mark.parametrize("descriptors", [(1 << 20, 1 << 20), (8, 16)])
def test_idle_connections_lock_nobody_out(
    monkeypatch: pytest.MonkeyPatch, descriptors: tuple[int, int]
) -> None:
    """Not if descriptors are few either: their limit is raised, and half of them are kept free."""
    limits = []
    if descriptors[0] > 8:
        monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(resource, "getrlimit", lambda _: descriptors)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))

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
        assert limits == [(descriptors[1], descriptors[1])]
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
def test_clients_that_stop_reading_are_given_up(lost: asyncio.Event, last: bytes) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n" + last + b"\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await lost.wait()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(len(LARGE))
        writer.close()

    serve_nothing(client)


def test_clients_that_read_nothing_and_close_are_given_up_though_they_wait_for_an_answer(
    lost: asyncio.Event,
) -> None:
    """What is unsent keeps the connection from ending at the client's end of file."""
    app = Ok()

    async def client(port: int) -> None:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", port))
            raw.sendall(REQUEST * 300 + REQUEST.replace(b" / ", b" /later "))
            raw.shutdown(socket.SHUT_WR)
            respond: Any = await app.later.get()
            while not respond.__self__.transport.is_closing():
                await asyncio.sleep(0.01)
            respond(HttpResponse(b"ok"))
            await asyncio.wait_for(lost.wait(), 60)

    serve(app, client, send_buffer=4096)


def test_clients_that_keep_a_closing_connection_are_given_up(lost: asyncio.Event) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"nonsense\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        await asyncio.wait_for(lost.wait(), 60)
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
        assert await reader.readexactly(2) == b"ok"
        writer.write(b"POST / HTTP/1.0\r\n" + expecting)  # which does not know that answer
        await asyncio.sleep(0.1)
        writer.write(b"{}")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    serve_nothing(client)


def test_a_body_is_asked_for_behind_the_answers_before_it() -> None:
    app = Ok()
    expecting = b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b" / ", b" /later ") + expecting)
        respond = await app.later.get()
        await asyncio.sleep(0.1)
        respond(HttpResponse(b"ok"))
        for status in (b"200 OK", b"100 Continue"):
            assert status in await reader.readuntil(b"\r\n\r\n")
            assert status != b"200 OK" or await reader.readexactly(2) == b"ok"
        writer.write(b"{}")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    serve(app, client)


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"],
)
def test_offers_of_another_protocol_are_declined(body: bytes) -> None:
    """As Java's client makes them with each request."""
    offer = b"HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nX: 1\r\n"

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = b"POST /echo " + offer + body + b"GET /echo " + offer + b"\r\n" + REQUEST
        for part in (sent, sent[:20], sent[20:90], sent[90:]):
            writer.write(part)
            await asyncio.sleep(0.01)
        for method, content in [("POST", b"body"), ("GET", b""), ("", b"")] * 2:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head and b"Connection: close" not in head
            answer = await reader.readexactly(int(head.split(b"Content-Length: ")[1].split()[0]))
            if method:
                given, headers, received = ast.literal_eval(answer.decode())
                assert (given, headers["x"], received) == (method, "1", content)
        writer.write(b"GET / " + offer.replace(b"Upgrade, ", b"close, Upgrade, ") + b"\r\n")
        assert b"Connection: close" in await reader.read()
        writer.close()

    serve_nothing(client)


def test_trailers_change_no_header() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /echo HTTP/1.1\r\nX: first\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: last\r\n\r\n"
        )
        assert b"'x': 'first'" in await reader.read()
        writer.close()

    serve_nothing(client)


def test_a_request_behind_a_closing_answer_does_not_run() -> None:
    app = Ok()

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + REQUEST)
        assert (await reader.read()).count(b"200 OK") == 1
        assert app.paths == ["/"]
        writer.close()

    serve(app, client)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /early HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", b"200 OK"),
        (b"POST /early HTTP/1.0\r\nContent-Length: %d\r\n\r\n", b"200 OK"),
        (b"POST / HTTP/1.1\r\nContent-Length: x%d\r\n\r\n", b"400 Bad Request"),
    ],
)
def test_refusals_reach_clients_that_send_all_before_they_read(head: bytes, status: bytes) -> None:
    """Closing the connection sooner would reset it, and the refusal would be lost."""

    def exchange(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(head % len(LARGE) + LARGE)
            return raw.recv(1000)

    async def client(port: int) -> None:
        assert status in await asyncio.to_thread(exchange, port)

    serve_nothing(client)


@pytest.mark.timeout(60)
def test_a_server_that_ends_waits_no_longer_than_for_a_refused_body() -> None:
    async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await asyncio.sleep(0.3)  # the server ends
            writer.write(b"{}")
            assert await reader.read() == b""

    async def client(port: int) -> asyncio.Task[None]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /early HTTP/1.1\r\nContent-Length: 2\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"ok"
        return asyncio.create_task(finish(reader, writer))

    serve(Ok(), client, grace_s=1000.0)


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


def test_what_is_sent_ahead_lets_others_be_served() -> None:
    """A few at a time are answered in one turn of the event loop."""
    turns = [0]

    class Counting(Ok):
        def answer(
            self, request: HttpRequest, respond: Callable[[HttpResponse], object]
        ) -> Future[Any] | None:
            turns[-1] += 1
            return super().answer(request, respond)

    async def count() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    async def client(port: int) -> None:
        counter = asyncio.create_task(count())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST * 500)
        for _ in range(500):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        counter.cancel()
        assert sum(turns) == 500 and max(turns) <= 32
        writer.close()

    serve(Counting(), client)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: what\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, b"431"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokx", b"400"),
        (REQUEST + b"\0\0", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"CONNECT http://a/ HTTP/1.1\r\nUpgrade: h2c\r\n\r\n", b"400"),
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


def test_a_negative_view_travels_in_binary() -> None:
    x = torch.tensor([1 + 2j]).conj().imag
    entries, raw = encode({"x": x}, binary=True)
    assert torch.equal(decode(entries, memoryview(raw[0]))["x"], torch.tensor([-2.0]))


@pytest.mark.parametrize("shape", [[0, 1 << 70], [0, 1 << 40, 1 << 40], [1 << 62, 64]])
@pytest.mark.parametrize("content", [{"data": []}, {"parameters": {"binary_data_size": 0}}])
def test_sizes_that_torch_cannot_hold_are_refused(shape: list[int], content: Any) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": shape, **content}
    with pytest.raises(ArgumentError, match=r"input 'x' has the shape .*product at most"):
        decode([entry], memoryview(b""))


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
