"""Messages between ranks of different hosts, over TCP.

Every rank listens. Two ranks are connected when one of them first sends to the other, or waits for
it; each of them sends over the first connection that it has. A connection starts with a preamble
that holds the group's token, and is closed otherwise. Frames follow in the order in which they
were sent, each a header and its bytes.

One thread per connection reads each frame straight into the memory of the receive that it is for.
If no receive waits for it, a frame is buffered if it is small, or if it blocks another frame. The
caller sends as many bytes as the socket accepts at once; one thread per peer sends the rest. Both
release Python's lock while bytes move, and move a whole frame in one system call.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torchrelay._waiting import listed
from torchrelay.aggregation._dtypes import name_of
from torchrelay.aggregation._executor import Completion
from torchrelay.errors import MismatchError, OperationTimeoutError, PeerLostError

__all__ = ["ANY_RANK", "TOKEN_BYTES", "Failure", "Header", "Messages", "Receive"]

ANY_RANK = -1
TOKEN_BYTES = 16

_PREAMBLE = struct.Struct(f"<4sHHI{TOKEN_BYTES}s")  # magic, version, reserved, rank, token
_MAGIC, _VERSION = b"TRLA", 1
# Kind, code of the dtype, tag in shared memory, tag, bytes that follow.
_HEADER = struct.Struct("<BBxxIqQ")
_ASIDE_BYTES = 64 * 1024  # up to so many bytes nobody needs to wait for to let the next frame come
_INLINE_BYTES = 256 * 1024  # up to so many bytes the caller tries to send
_RECONNECT_S = 0.5  # how long a peer without a connection may have another on its way
_CONNECT_S = 10.0
_GREET_S = 5.0  # how long a stranger may take to present the token
_MAX_STRANGERS = 64
_WATCH_S = 1.0  # how often their time is checked
_RETRY_ACCEPT_S = 0.05
_FLUSH_S = 2.0
_PROBE_S = 0.5
_REPORT_S = 0.5
_POLL_S = 0.1
_DIED = (
    "has died or cannot be reached any more (its connection ended); look at its own output for the "
    "cause"
)
_LEFT = "has left the group (destroy_process_group, or its process ended)"

Failure = PeerLostError | OperationTimeoutError
Header = tuple[int, int, int, int, int]  # kind, code of the dtype, tag in shared memory, tag, bytes


class _Kind(IntEnum):
    DATA = 0
    LOCAL = 1  # the bytes are in shared memory
    FAILED = 2  # the sender's group is broken; bytes: why
    LEFT = 3


@dataclass
class Receive:
    """A receive in progress. ``view`` is written until ``completion`` is done."""

    source: int
    tag: int
    view: memoryview
    code: int
    completion: Completion = field(default_factory=Completion)

    def matches(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.source in (source, ANY_RANK)


@dataclass
class _Arrived:
    """A frame that was stored for a later receive."""

    source: int
    header: Header
    data: bytearray


class _Peer:
    """The connections to one rank. ``queue`` is sent in order over ``out``."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.connections: set[socket.socket] = set()
        self.out: socket.socket | None = None
        self.queue: deque[tuple[bytes, memoryview, Completion]] = deque()
        self.writing = False
        self.has_writer = False
        self.left = False

    def is_idle(self) -> bool:
        return not self.queue and not self.writing


class Messages:
    """One rank's messages with ranks of other hosts (and headers of those of its own). Thread-safe.

    Args:
        rank: in the group; ``addresses[r]`` is where rank r listens, ``names[r]`` how users know
            it.
        hosts: the ranks of each host.
        listener: bound and listening; owned from now on.
        token: of ``TOKEN_BYTES``, equal on all ranks and secret.
        take_local: called for a message whose bytes are in shared memory, with the receive, the
            source and the header.
        on_failure: called once, when the group breaks here or a peer reports that it broke.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        addresses: Sequence[tuple[str, int]],
        hosts: Sequence[Sequence[int]],
        listener: socket.socket,
        token: bytes,
        take_local: Callable[[Receive, int, Header], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._rank, self._names, self._addresses = rank, names, addresses
        self._hosts = hosts
        self._listener, self._token = listener, token
        self._take_local, self._on_failure = take_local, on_failure
        self._peers = [_Peer() for _ in addresses]
        self._changed = threading.Condition()  # guards what follows
        self._posted: list[Receive] = []
        self._aside: deque[_Arrived] = deque()
        self._gone: dict[int, str] = {}
        self._failure: Failure | None = None
        self._closed = False
        self._flushed = False  # after closing
        self._threads: list[threading.Thread] = []
        self.sent_bytes = self.received_bytes = 0
        self.waited_s = 0.0  # in `wait`
        self._start(self._accept, "accept")

    # --- sending and receiving

    def send(
        self, to: int, tag: int, data: memoryview, code: int = 0, local_tag: int | None = None
    ) -> Completion:
        """Send ``data``, which must not change until the completion is done; never blocks.

        With ``local_tag`` the bytes go through shared memory, and only their count is sent.
        """
        kind = _Kind.DATA if local_tag is None else _Kind.LOCAL
        header = _HEADER.pack(kind, code, local_tag or 0, tag, data.nbytes)
        return self._post(to, header, data if local_tag is None else memoryview(b""))

    def receive(self, source: int, tag: int, view: memoryview, code: int = 0) -> Receive:
        """Receive the next message of ``tag`` from ``source`` (or ANY_RANK) into ``view``; never
        blocks.
        """
        receive = Receive(source, tag, view, code)
        with self._changed:
            if self._failure is not None:
                receive.completion.finish(self._failure)
                return receive
            arrived = next((a for a in self._aside if receive.matches(a.source, a.header[3])), None)
            if arrived is None:
                if source in self._gone:
                    receive.completion.finish(self._gone_error(source))
                else:
                    self._posted.append(receive)
                    self._changed.notify_all()
            else:
                self._aside.remove(arrived)
        if arrived is not None:
            self._deliver(receive, arrived)
        elif source != ANY_RANK:
            self.connect(source)
        return receive

    def connect(self, to: int) -> None:
        """Connect to a rank, so that its loss is detected. Does not wait."""
        peer = self._peers[to]
        with peer.lock:
            if not peer.connections:
                self._wake_writer(to, peer)

    def wait(
        self,
        completion: Completion,
        peer: int,
        operation: str,
        deadline_s: float,
        poll: Callable[[], None],
    ) -> None:
        """Wait for a send or receive.

        Args:
            peer: the rank that a timeout names.
            poll: called about ten times a second; raises to stop.

        Raises:
            OperationTimeoutError: it is not done at ``deadline_s`` of the monotonic clock.
            PeerLostError: the peer was lost, or the group is broken.
        """
        started_s = time.monotonic()
        try:
            while not self._wait_a_slice(completion, peer, operation, deadline_s):
                poll()
        finally:
            self.waited_s += time.monotonic() - started_s

    def _wait_a_slice(
        self, completion: Completion, peer: int, operation: str, deadline_s: float
    ) -> bool:
        try:
            if completion.wait(min(_POLL_S, deadline_s - time.monotonic())):
                return True
            if time.monotonic() < deadline_s:
                return False
            raise OperationTimeoutError(
                f"rank {self._names[self._rank]}, {operation}: rank {self._names[peer]} did not "
                "answer in time; is it stuck, slow or cut off? A longer timeout can be given to "
                "init_process_group",
                ranks=(self._names[peer],),
            )
        except (PeerLostError, OperationTimeoutError) as error:
            raise self.with_host(error, peer) from None

    def lost(self, ranks: Sequence[int]) -> Failure | None:
        """Return the error for the first of ``ranks`` whose connection ended without a farewell.

        Blocks if there is one. A rank that has left the group is not lost: it has finished.
        """
        with self._changed:
            gone = next(
                (rank for rank in ranks if rank in self._gone and not self._peers[rank].left), None
            )
        return None if gone is None else self.with_host(self._gone_error(gone), gone)

    def with_host(self, error: Failure, peer: int) -> Failure:
        """Name also the ranks that share a lost rank's host and cannot be reached either.
        Blocks.
        """
        ranks = next(ranks for ranks in self._hosts if peer in ranks)
        others = [
            self._names[rank]
            for rank in ranks
            if self._failure is None and rank != peer and not self.is_reachable(rank, _PROBE_S)
        ]
        if not others:
            return error
        with self._changed:  # or they ended because they knew, and their report is on its way here
            if self._changed.wait_for(lambda: self._failure is not None, _REPORT_S):
                return error
        return type(error)(
            f"{error}; nor can {listed('rank', others)} of its host be reached",
            ranks=sorted([*error.ranks, *others]),
        )

    def cancel(self, completion: Completion, error: Exception) -> None:
        """Cancel a receive or send. A message that arrives for it later is stored."""
        with self._changed:
            self._posted = [
                receive for receive in self._posted if receive.completion is not completion
            ]
        completion.finish(error)

    # --- the end

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def fail(self, error: Failure) -> Failure:
        """Break the group: everything in progress fails, and other ranks receive the reason.

        It is sent to the leaders of the other hosts, which pass it on, and to each rank that would
        otherwise only see its connection close. Returns the failure that counts: the first.
        """
        with self._changed:
            if self._failure is not None:
                return self._failure
            self._failure = error
            posted, self._posted = self._posted, []
            self._changed.notify_all()
        for receive in posted:
            receive.completion.finish(error)
        body = json.dumps(
            {
                "text": str(error),
                "ranks": error.ranks,
                "timeout": isinstance(error, OperationTimeoutError),
            }
        ).encode()
        frame = _HEADER.pack(_Kind.FAILED, 0, 0, 0, len(body)) + body
        leaders = [ranks[0] for ranks in self._hosts if self._rank not in ranks]
        for rank, peer in enumerate(self._peers):
            if peer.connections:
                self._post(rank, frame, memoryview(b""), even_if_failed=True)
            if rank in leaders:  # earlier frames may block its connection
                self._start(self._report, f"report-{self._names[rank]}", rank, frame)
        self._stop_reading()  # then connections end, so what the others are to know is sent before
        self._on_failure(error)
        return error

    def _report(self, to: int, frame: bytes) -> None:
        """Send ``frame`` over a separate connection."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self._addresses[to], _CONNECT_S) as connection,
        ):
            preamble = _PREAMBLE.pack(_MAGIC, _VERSION, 0, self._rank, self._token)
            connection.sendall(preamble + frame)

    def _stop_reading(self) -> None:
        """End the receives that are half done: their memory is the caller's again."""
        for peer in self._peers:
            with peer.lock:
                for connection in peer.connections:
                    _shut(connection, socket.SHUT_RD)

    def is_reachable(self, rank: int, timeout_s: float) -> bool:
        """Return whether a process still listens at the address of ``rank``. Blocks."""
        try:
            socket.create_connection(self._addresses[rank], timeout_s).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Send what is queued for at most two seconds, notify all peers, and disconnect.
        Idempotent.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        deadline_s = time.monotonic() + _FLUSH_S
        for rank, peer in enumerate(self._peers):
            if peer.connections:
                self._post(
                    rank, _HEADER.pack(_Kind.LEFT, 0, 0, 0, 0), memoryview(b""), even_if_failed=True
                )
        for peer in self._peers:
            with peer.lock:
                peer.lock.wait_for(peer.is_idle, deadline_s - time.monotonic())
        self._flushed = True
        for peer in self._peers:
            with peer.lock:
                for connection in peer.connections:
                    _shut(connection)
                left, peer.queue = peer.queue, deque()
                peer.lock.notify_all()
            for _, _, completion in left:
                completion.finish(self._closed_error())
        _shut(self._listener)
        self._listener.close()
        with self._changed:
            posted, self._posted = self._posted, []
            self._changed.notify_all()
            threads = [
                thread for thread in self._threads if thread is not threading.current_thread()
            ]
        for receive in posted:
            receive.completion.finish(self._closed_error())
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # --- writing

    def _post(
        self, to: int, header: bytes, data: memoryview, even_if_failed: bool = False
    ) -> Completion:
        completion = Completion()
        if self._failure is not None and not even_if_failed:
            completion.finish(self._failure)
            return completion
        self.sent_bytes += data.nbytes
        peer = self._peers[to]
        with peer.lock:
            if (
                peer.out is not None
                and not peer.queue
                and not peer.writing
                and data.nbytes <= _INLINE_BYTES
            ):
                header, data = _send_now(peer.out, header, data)
                if not header and not data.nbytes:
                    completion.finish()
                    return completion
            peer.queue.append((header, data, completion))
            self._wake_writer(to, peer)
        return completion

    def _wake_writer(self, to: int, peer: _Peer) -> None:
        """Start or wake the thread that writes to the peer. Called with the peer's lock."""
        peer.lock.notify_all()
        if not peer.has_writer:
            peer.has_writer = True
            self._start(self._write, f"to-{self._names[to]}", to, peer)

    def _write(self, to: int, peer: _Peer) -> None:
        """Connect, and send what is queued, until the group ends."""
        connection = self._connected(to, peer)
        while True:
            with peer.lock:
                peer.lock.wait_for(lambda: peer.queue or self._closed)
                if not peer.queue:
                    return
                header, data, completion = peer.queue.popleft()
                peer.writing = True
            error: BaseException | None = None
            try:
                if connection is None:
                    raise OSError("cannot be reached")
                connection.sendall(header, socket.MSG_MORE if data.nbytes else 0)
                connection.sendall(data)
            except OSError as cause:
                error = self._failure or self._why_gone(to, cause)
            with peer.lock:
                peer.writing = False
                peer.lock.notify_all()
            completion.finish(error)
            del header, data, completion

    def _connected(self, to: int, peer: _Peer) -> socket.socket | None:
        with peer.lock:
            if peer.out is not None:
                return peer.out
        try:
            connection = socket.create_connection(self._addresses[to], _CONNECT_S)
        except OSError as error:
            arriving = self._arriving(peer)
            if arriving is None:
                self._lose(to, f"cannot be reached ({error})")
            return arriving
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            connection.sendall(_PREAMBLE.pack(_MAGIC, _VERSION, 0, self._rank, self._token))
        self._add(to, connection)
        self._start(self._read, f"from-{self._names[to]}", to, connection)
        return peer.out

    def _arriving(self, peer: _Peer) -> socket.socket | None:
        """Wait for a connection from a rank that may have sent its last message and left."""
        with peer.lock:
            peer.lock.wait_for(lambda: peer.out is not None or self._closed, _RECONNECT_S)
            return peer.out

    def _add(self, rank: int, connection: socket.socket) -> None:
        peer = self._peers[rank]
        with peer.lock:
            peer.connections.add(connection)
            if peer.out is None:
                peer.out = connection
                peer.lock.notify_all()
            if self._flushed:
                _shut(connection)

    # --- reading

    def _accept(self) -> None:
        """Accept connections until the group ends. One that has not presented the token yet is a
        stranger; the number of strangers and the time of each are bounded.
        """
        strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        with selectors.DefaultSelector() as selector:

            def greet(connection: socket.socket, last_look: bool = False) -> None:
                stranger = strangers[connection]
                if not stranger.is_waiting() or last_look:
                    selector.unregister(connection)
                    del strangers[connection]
                    self._admit(self._rank_of(stranger), connection)

            def end_oldest() -> None:
                if strangers:
                    greet(next(iter(strangers)), last_look=True)

            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select(_WATCH_S):
                    if key.fileobj in strangers:
                        greet(key.fileobj)
                    if key.fileobj is not self._listener:
                        continue
                    try:
                        connection, _ = self._listener.accept()
                    except OSError:  # there may be no descriptor left
                        end_oldest()
                        time.sleep(_RETRY_ACCEPT_S)
                        continue
                    connection.setblocking(False)
                    if len(strangers) >= _MAX_STRANGERS:
                        end_oldest()
                    strangers[connection] = _Stranger(connection)
                    selector.register(connection, selectors.EVENT_READ)
                while strangers and next(iter(strangers.values())).is_late():
                    end_oldest()
            while strangers:
                end_oldest()

    def _rank_of(self, stranger: _Stranger) -> int | None:
        """Return the rank that has presented the token, or None if it is not one of this group."""
        if len(stranger.preamble) < _PREAMBLE.size:
            return None
        magic, version, _, rank, token = _PREAMBLE.unpack(stranger.preamble)
        is_ours = (magic, version) == (_MAGIC, _VERSION) and hmac.compare_digest(token, self._token)
        return rank if is_ours and rank < len(self._peers) else None

    def _admit(self, rank: int | None, connection: socket.socket) -> None:
        if rank is None:
            connection.close()
            return
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._add(rank, connection)
        self._start(self._read, f"from-{self._names[rank]}", rank, connection)

    def _read(self, source: int, connection: socket.socket) -> None:
        """Read frames until the connection ends."""
        header = bytearray(_HEADER.size)
        # The connection ended, or what came over it is no frame.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, MemoryError):
            while _read_exactly(connection, memoryview(header)):
                fields = _HEADER.unpack(header)
                kind, *_, size = fields
                if kind == _Kind.LEFT:
                    self._peers[source].left = True
                elif kind == _Kind.FAILED:
                    self._hear_failure(_read_body(connection, size))
                else:
                    self.received_bytes += size if kind == _Kind.DATA else 0
                    if not self._take(source, fields, connection):
                        break
        self._drop(source, connection)

    def _take(self, source: int, header: Header, connection: socket.socket) -> bool:
        """Read the bytes of a frame; return False if the connection ended."""
        kind, code, _, tag, size = header
        receive = self._claim(source, tag, size)
        fits = receive is not None and (code, size) == (receive.code, receive.view.nbytes)
        if receive is not None and fits and kind == _Kind.DATA:
            if not _read_exactly(connection, receive.view):
                receive.completion.finish(self._failure or self._gone_error(source))
                return False
            receive.source = source
            receive.completion.finish()
            return True
        arrived = _Arrived(source, header, bytearray(size if kind == _Kind.DATA else 0))
        if not _read_exactly(connection, memoryview(arrived.data)):
            return False
        with self._changed:
            if receive is None:
                receive = self._pop_posted(source, tag)
            if receive is None:
                self._aside.append(arrived)
                return True
        self._deliver(receive, arrived)
        return True

    def _claim(self, source: int, tag: int, size: int) -> Receive | None:
        """Wait for the receive of a frame; return None if the frame is to be stored."""
        with self._changed:
            while not self._closed:
                receive = self._pop_posted(source, tag)
                is_in_the_way = any(posted.source in (source, ANY_RANK) for posted in self._posted)
                if receive is not None or size <= _ASIDE_BYTES or is_in_the_way:
                    return receive
                self._changed.wait()
        return None

    def _pop_posted(self, source: int, tag: int) -> Receive | None:
        """Remove and return the posted receive of a frame. Called with the lock."""
        for index, receive in enumerate(self._posted):
            if receive.matches(source, tag):
                return self._posted.pop(index)
        return None

    def _deliver(self, receive: Receive, arrived: _Arrived) -> None:
        kind, code, _, _, size = arrived.header
        receive.source = arrived.source
        if kind == _Kind.LOCAL:
            self._take_local(receive, arrived.source, arrived.header)
        elif (code, size) != (receive.code, receive.view.nbytes):
            receive.completion.finish(self.size_error(arrived.source, receive, arrived.header))
        else:
            receive.view[:] = arrived.data
            receive.completion.finish()

    def size_error(self, source: int, receive: Receive, header: Header) -> MismatchError:
        """Return the error of a receive whose message has another size or dtype."""
        _, dtype, _, tag, size = header
        name = self._names[source]
        return MismatchError(
            f"rank {self._names[self._rank]}, recv from rank {name}, tag {tag}: rank {name} sent "
            f"{size} bytes of {name_of(dtype)}, but the receiver expects {receive.view.nbytes} "
            f"bytes of {name_of(receive.code)}; use the same shape and dtype on both"
        )

    def _hear_failure(self, body: bytearray) -> None:
        told = json.loads(body)
        kind = OperationTimeoutError if told["timeout"] else PeerLostError
        self.fail(kind(told["text"], ranks=told["ranks"]))

    def _drop(self, source: int, connection: socket.socket) -> None:
        """Forget a connection; without another one its peer is lost."""
        peer = self._peers[source]
        with peer.lock:
            peer.connections.discard(connection)
            is_last = not peer.connections
        if is_last and not self._closed:
            if not peer.left:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _RECONNECT_S)
            with peer.lock:
                is_last = not peer.connections
            if is_last:
                self._lose(source, _LEFT if peer.left else _DIED)
        with peer.lock:  # a failure may still have to be sent
            peer.lock.wait_for(peer.is_idle, _FLUSH_S if self._failure else 0)
        connection.close()

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            self._gone[rank] = reason
            lost = [receive for receive in self._posted if receive.source == rank]
            self._posted = [receive for receive in self._posted if receive.source != rank]
            self._changed.notify_all()
        for receive in lost:
            receive.completion.finish(self._gone_error(rank))

    def _gone_error(self, rank: int) -> PeerLostError:
        name = self._names[rank]
        return PeerLostError(f"rank {name} {self._gone.get(rank, _DIED)}", ranks=(name,))

    def _why_gone(self, rank: int, cause: OSError) -> PeerLostError:
        """Return the error of a failed send; the thread that reads from the peer may know the
        reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: rank in self._gone, 2 * _RECONNECT_S)
            self._gone.setdefault(rank, f"cannot be reached any more ({cause})")
        return self._gone_error(rank)

    def _closed_error(self) -> PeerLostError:
        return PeerLostError("the group was destroyed on this rank before the operation ended")

    def _start(self, target: Callable[..., None], label: str, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"sml-{label}", daemon=True)
        with self._changed:
            self._threads.append(thread)
        thread.start()


class _Stranger:
    """A connection that has not sent a whole preamble yet. It does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline_s = time.monotonic() + _GREET_S
        self.preamble = b""

    def is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def is_waiting(self) -> bool:
        """Read what has arrived; return whether more must come."""
        try:
            data = self._connection.recv(_PREAMBLE.size - len(self.preamble))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.preamble += data
        return bool(data) and len(self.preamble) < _PREAMBLE.size


def _send_now(
    connection: socket.socket, header: bytes, data: memoryview
) -> tuple[bytes, memoryview]:
    """Send what the socket accepts at once; return the rest. The next attempt raises errors."""
    try:
        sent = connection.sendmsg([header, data], [], socket.MSG_DONTWAIT)
    except OSError:
        return header, data
    return header[sent:], data[max(0, sent - len(header)) :]


def _read_exactly(connection: socket.socket, view: memoryview) -> bool:
    """Fill ``view``; return False if the connection ended before."""
    while view.nbytes:
        count = connection.recv_into(view, view.nbytes, socket.MSG_WAITALL)
        if count == 0:
            return False
        view = view[count:]
    return True


def _read_body(connection: socket.socket, size: int) -> bytearray:
    body = bytearray(size)
    if not _read_exactly(connection, memoryview(body)):
        raise ConnectionError("cut off")
    return body


def _shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
