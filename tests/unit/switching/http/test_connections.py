"""The server's connections, with a trivial application: limits, bad clients, half-closed ones."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchrelay.errors import OverloadedError, UnavailableError
from torchrelay.switching.http import _protocol, _server
from torchrelay.switching.http._messages import (
    DisconnectedError,
    HttpError,
    Limits,
    Receive,
    Request,
    Scope,
    Send,
)
from torchrelay.switching.http._protocol import Connection
from torchrelay.switching.http._server import HttpServer, bind

LARGE = bytes(32 << 20)


class Ok:
    """An application that answers "ok" to everything: at /early, before it has the body; at /later,
    when the test completes the future that `later` holds. At /large it sends much, at /echo the
    request.
    """

    def __init__(self) -> None:
        self.limits = Limits(1000)
        self.paths: list[str] = []
        self.later: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, self.limits)
        status, body = 200, b"ok"
        try:
            if request.refusal is not None:
                raise request.refusal
            if request.path != "/early":
                body = await self.answer(request)
            self.limits.check_space(len(body))
        except OverloadedError:
            status, body = 500, b"full"
        except HttpError as error:
            status, body = error.status, str(error).encode()
        except (DisconnectedError, asyncio.CancelledError):
            return
        if request.path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def answer(self, request: Request) -> bytes:
        self.paths.append(request.path)
        content = bytes(await request.body())
        if request.path == "/later":
            later = asyncio.get_running_loop().create_future()
            self.later.put_nowait(later)
            await later
        echo = repr((request.method, request.headers, content)).encode()
        return {"/large": LARGE, "/echo": echo}.get(request.path, b"ok")


def serve(
    app: Any,
    client: Callable[[int], Awaitable[asyncio.Task[None] | None]],
    *,
    grace_s: float = 10.0,
    send_buffer: int | None = None,
    port: int = 0,
    on_late: Callable[[], object] = lambda: None,
) -> None:
    """Run ``client`` with the port of a server of `app`, then end the server, then await the task
    that ``client`` returned, if any.
    """

    async def run() -> None:
        with bind("127.0.0.1", port) as listener:
            if send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            started = asyncio.Event()
            server = HttpServer(
                app, app.limits, grace_s, started.set, lambda: False, on_late=on_late
            )
            task = asyncio.create_task(server.serve([listener]))
            await started.wait()
            try:
                last = await client(listener.getsockname()[1])
            finally:
                server.stop()
                await task
            if last is not None:
                await last

    asyncio.run(run())


def serve_nothing(client: Callable[[int], Awaitable[None]], port: int = 0) -> None:
    serve(Ok(), client, port=port)


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


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
            await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
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
    monkeypatch.setattr(_protocol, "REQUEST_TIMEOUT_S", 0.2)
    lost = asyncio.Event()
    end = Connection.connection_lost

    def end_and_note(connection: Any, error: Exception | None) -> None:
        end(connection, error)
        lost.set()

    monkeypatch.setattr(Connection, "connection_lost", end_and_note)
    return lost


@pytest.mark.parametrize("descriptors", [(1 << 20, 1 << 20), (8, 16)])
def test_idle_connections_lock_nobody_out(
    monkeypatch: pytest.MonkeyPatch, descriptors: tuple[int, int]
) -> None:
    """Not if descriptors are few either: their limit is raised, and half of them are kept free."""
    limits = []
    if descriptors[0] > 8:
        monkeypatch.setattr(_server, "MAX_CONNECTIONS", 8)
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
    monkeypatch.setattr(_protocol, "REQUEST_TIMEOUT_S", 0.2)

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
    monkeypatch.setattr(_protocol, "REQUEST_TIMEOUT_S", 0.2)

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
            respond = await app.later.get()
            await asyncio.sleep(0.3)
            respond.set_result(None)
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
    server = HttpServer(Ok(), Limits(1000), 10.0, lambda: None, lambda: False)

    async def run() -> None:
        connection = server.config.http_protocol_class(  # type: ignore[call-arg]
            config=server.config, server_state=server.server_state, app_state={}
        )
        assert isinstance(connection, Connection)
        transport: Any = SimpleNamespace(
            get_write_buffer_size=lambda: unsent.pop(0),
            abort=lambda: aborted.append(len(unsent)),
        )
        connection.transport = transport
        for _ in range(3):
            connection.give_up()

    asyncio.run(run())
    assert aborted == [0]  # only when nothing more had been read


def test_a_body_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_protocol, "REQUEST_TIMEOUT_S", 0.2)
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
        assert b"200 OK" in answer and b"content-length: 2" in answer
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
        respond.set_result(None)
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
            assert b"200 OK" in head and b"connection: close" not in head
            answer = await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
            if method:
                given, headers, received = ast.literal_eval(answer.decode())
                assert (given, headers["x"], received) == (method, "1", content)
        writer.write(b"GET / " + offer.replace(b"Upgrade, ", b"close, Upgrade, ") + b"\r\n")
        assert b"connection: close" in await reader.read()
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
        writer.write(b"GET / HTTP/1.0\r\n\r\n" + REQUEST)
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
            with contextlib.suppress(ConnectionResetError):
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
        async def answer(self, request: Request) -> bytes:
            turns[-1] += 1
            return await super().answer(request)

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
        assert answers[-1].startswith(status) and b"connection: close" in answers[-1]
        assert len(answers) == 1 + sent.startswith(REQUEST)
        writer.close()

    serve_nothing(client)


@pytest.mark.parametrize("later", [False, True])
def test_half_closed_clients_get_their_answer(later: bool) -> None:
    """Each of those that they have asked for, in order; of half a request they get none."""
    app = Ok()
    first = REQUEST.replace(b" / ", b" /later ") if later else REQUEST

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first + REQUEST)
        writer.write_eof()
        if later:
            respond = await app.later.get()
            await asyncio.sleep(0.1)
            respond.set_result(None)
        assert (await reader.read()).count(b"200 OK") == 2
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST[:20])
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    serve(app, client)


def test_clients_that_are_gone_are_told_from_half_closed_ones(
    lost: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reset the connection when they get what half-closed clients ignore."""
    monkeypatch.setattr(_protocol, "_PROBE_S", 1)
    app = Ok()

    async def client(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(REQUEST.replace(b" / ", b" /later "))
            respond = await app.later.get()
        await asyncio.wait_for(lost.wait(), 60)
        await asyncio.sleep(0)
        assert respond.cancelled()

    serve(app, client)


def test_clients_of_the_first_version_may_keep_their_connection() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head and b"connection: close" not in head
            assert await reader.readexactly(2) == b"ok"
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert b"connection: close" in await reader.read()
        writer.close()

    serve_nothing(client)


def test_clients_of_the_first_version_get_streams_without_chunks() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert body == b"ok" and b"chunked" not in head and b"connection: close" in head
        writer.close()

    serve_nothing(client)


@pytest.mark.parametrize("ending", [b"\r\n\r\n", b""])
@pytest.mark.parametrize("field", [b"GET /%s HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: %s\r\n"])
def test_long_heads_are_refused_whether_they_arrive_at_once_or_in_parts(
    field: bytes, ending: bytes
) -> None:
    sent = field % (b"x" * 70_000) + ending

    async def client(port: int) -> None:
        for step in (len(sent), 10_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for start in range(0, len(sent), step):
                writer.write(sent[start : start + step])
                await asyncio.sleep(0.01)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 431 ") and answer.count(b"HTTP/1.1") == 1
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


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    with (
        bind("127.0.0.1", port),  # which does not listen yet
        pytest.raises(UnavailableError, match=r"cannot serve on 127\.0\.0\.1.*--port"),
    ):
        bind("127.0.0.1", port)
    with pytest.raises(UnavailableError, match=r"cannot serve on nowhere\.invalid"):
        bind("nowhere.invalid", 0)


def test_what_ends_the_requests_that_are_left_after_the_grace_is_answered() -> None:
    app = Ok()

    async def client(port: int) -> asyncio.Task[None]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b" / ", b" /later "))
        left.append(await app.later.get())

        async def read() -> None:
            assert b"200 OK" in await reader.read()
            writer.close()

        return asyncio.create_task(read())

    left: list[asyncio.Future[None]] = []
    serve(app, client, grace_s=0.0, on_late=lambda: left.pop().set_result(None))


def test_a_server_follows_another_on_its_port() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"200 OK" in await reader.read()  # the server has closed, and its address lingers
        writer.close()

    port = free_port()
    for _ in range(2):
        serve_nothing(client, port)
