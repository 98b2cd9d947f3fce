"""
The native core: memory, reductions and messages. Knows neither torch nor the components.
"""

from collections.abc import Callable, Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


def crc32c(data: object, crc: int = 0) -> int:
    """
    The CRC32C of a buffer that follows bytes whose checksum is crc. Releases the GIL.
    """

def crc32c_blocks(data: object, block_bytes: int) -> bytes:
    """
    The CRC32C of each block of a buffer, 4 bytes each in the machine's order. Releases the GIL.
    """

def crc32c_of_file(fd: int, starts: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], into: Annotated[NDArray[numpy.uint64], dict(shape=(3, None), order='C', device='cpu', writable=False)] | None = None) -> tuple[bytes, int]:
    """
    The CRC32C of ranges of a file, 4 bytes each, and where the last one ends, or the file before it. Of ranges that ascend, parts are copied too: rows of starts, sizes and addresses. Releases the GIL.
    """

def crc32c_of_memory(addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bytes:
    """
    The CRC32C of ranges of memory, 4 bytes each in the machine's order. Releases the GIL.
    """

def copy_memory(targets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sources: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Copy ranges of memory, which do not overlap, one after another. Releases the GIL.
    """

class Endpoint:
    """Sends and receives messages; threads take turns."""

    @property
    def address(self) -> str: ...

    def connect(self, peer: int, address: str) -> None: ...

    def disconnect(self, peer: int) -> None: ...

    def send(self, peer: int, data: bytes, contents: bytes | memoryview = b'') -> None:
        """Sends `data`, and then `contents`, in one message."""

    def has_unsent(self, peer: int) -> bool:
        """
        Return whether messages wait until `peer`, which has not ended, reads earlier ones.
        """

    def receive(self, timeout_s: float) -> memoryview | None: ...

class Network:
    """Opens endpoints."""

    def open(self, label: str) -> Endpoint: ...

class MemoryNetwork(Network):
    """Endpoints of one process."""

    def __init__(self) -> None: ...

    def cut(self, label: str) -> None: ...

class DelayedNetwork(Network):
    """Another network, whose messages it delays, reorders and duplicates."""

    def __init__(self, network: Network, max_delay_s: float = 0.0, duplicate_probability: float = 0.0, seed: int = 0) -> None: ...

class Tls:
    """Encrypts connections with a key, by the libssl at a path."""

    def __init__(self, library_path: str, key: bytes) -> None: ...

class TcpNetwork(Network):
    """Endpoints over sockets; see transport.network."""

    def __init__(self, *, token: bytes, tls: Tls | None = None, interface: str = '127.0.0.1', max_message_bytes: int = 1073741824, local_sockets: bool = True, peer_timeout_s: float = 10.0, linger_s: float = 1.0) -> None: ...

    @property
    def ignored_connections(self) -> int: ...

def twister_polynomial(distance: int) -> bytes:
    """
    x to the distance, modulo the characteristic polynomial of mt19937: 2496 bytes for twister_jump.
    """

def twister_jump(state: Annotated[NDArray[numpy.uint32], dict(shape=(624), order='C', device='cpu')], polynomial: bytes) -> None:
    """
    Replaces the 624 words of state by those distance words on; polynomial is that of distance - 1.
    """

class Origin:
    """The process in which it was made."""

    def __init__(self) -> None: ...

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from it. Costs no system call."""

    @property
    def pid(self) -> int: ...

def anonymous_file(label: str, size_bytes: int = 0) -> int:
    """
    The descriptor of a new file without a name, in memory where memfd_create is allowed.
    """

def remedy(error: int) -> str:
    """
    What to do where a call failed with this errno because something has run out; else empty.
    """

class SharedMemory:
    """
    A block of memory that several processes of one host map; see buffers.Segment.
    """

    @staticmethod
    def create(size_bytes: int, label: str, populate: bool = False) -> SharedMemory: ...

    @staticmethod
    def attach(address: str, read_only: bool = False) -> SharedMemory: ...

    @staticmethod
    def from_fd(fd: int, read_only: bool = False) -> SharedMemory: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def read_only(self) -> bool: ...

    @property
    def fd(self) -> int: ...

    @property
    def address(self) -> str: ...

class Ticket:
    """The fate of one operation."""

    @property
    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool: ...

    def when_done(self, function: Callable[[], None]) -> None: ...

class Transfer:
    """A send or receive in progress."""

    @property
    def ticket(self) -> Ticket: ...

    @property
    def source(self) -> int: ...

    @property
    def tag(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

class Failure:
    """Why a group cannot be used any more."""

    def __init__(self, message: str, ranks: Sequence[int], timed_out: bool) -> None: ...

    @property
    def message(self) -> str: ...

    @property
    def ranks(self) -> list[int]: ...

    @property
    def timed_out(self) -> bool: ...

class Dtype(enum.Enum):
    """Element types, under torch's names."""

    int8 = 0

    uint8 = 1

    int16 = 2

    int32 = 3

    int64 = 4

    float16 = 5

    bfloat16 = 6

    float32 = 7

    float64 = 8

    bool = 9

    complex64 = 10

    complex128 = 11

    complex32 = 12

    uint16 = 13

    uint32 = 14

    uint64 = 15

    float8_e4m3fn = 16

    float8_e5m2 = 17

class Op(enum.Enum):
    """Reductions, under c10d's names."""

    SUM = 0

    AVG = 1

    PRODUCT = 2

    MIN = 3

    MAX = 4

    BAND = 5

    BOR = 6

    BXOR = 7

    PREMUL_SUM = 8

def reduces(dtype: Dtype, op: Op) -> bool:
    """Whether the reduction is defined and supported."""

class Kind(enum.Enum):
    """Collectives."""

    nothing = 0

    all_reduce = 1

    reduce = 2

    reduce_scatter = 3

    broadcast = 4

    all_gather = 5

    gather = 6

    scatter = 7

    all_to_all = 8

    barrier = 9

    coalesced = 10

class Compression(enum.Enum):
    """How sums are encoded between hosts."""

    none = 0

    int8 = 1

    bf16 = 2

class Collective:
    """One rank's part in a collective."""

    def __init__(self, kind: Kind, inputs: Sequence[tuple[int, int]] = [], outputs: Sequence[tuple[int, int]] = [], code: int = 0, op: Op = Op.SUM, root: int = -1) -> None:
        """
        Of address and bytes of each block: all_reduce, reduce and broadcast have one output, which is the input too; all_reduce may have another input. `code` is that of the element type: of a reduction, a Dtype.
        """

    def compress(self, compression: Compression, lost: int = 0) -> None:
        """
        Encodes what a reduction sends to other hosts. `lost`, if not 0, is the address of a float32 for each element of an all_reduce: it gets what this rank's encodings lost of the sum, and keeps its values elsewhere.
        """

    def go_through(self, piece_bytes: int, start: Callable[[int, int, float], None], finish: Callable[[], Failure | None]) -> None:
        """
        Lets others sum an all_reduce between hosts: the leaders call `start(first, count, timeout_s)` for each piece, and `finish()` to wait for the oldest sum, which divides averages too.
        """

class Group:
    """
    One rank's part in a group: of the ranks of a host, or, once it is connected, of several. Thread-safe.
    """

    def __init__(self, memory: SharedMemory, rank: int, names: Sequence[int], spin_s: float, yield_s: float) -> None: ...

    @staticmethod
    def create_segment(size: int, slot_bytes: int, one_shot_bytes: int, mailbox_bytes: int) -> SharedMemory: ...

    @property
    def calls(self) -> int: ...

    @property
    def completed(self) -> int:
        """The calls that have ended without an error."""

    @property
    def payload_bytes(self) -> int: ...

    @property
    def shared_ns(self) -> int:
        """The time in which it waited in shared memory."""

    @property
    def shared_bytes(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def waited_ns(self) -> int: ...

    def join(self, timeout_s: float) -> None:
        """Waits until all ranks of this host have joined."""

    def connect(self, rank: int, names: Sequence[int], addresses: Sequence[tuple[str, int]], hosts: Sequence[Sequence[int]], listener: int, token: bytes, tls: Tls | None, share_bytes: int, piece_bytes: int, inline_bytes: int, on_failure: Callable[[Failure], None]) -> None:
        """
        Makes this rank one of a group of several hosts. `names[r]` is how users know rank r, `addresses[r]` where it listens, `hosts` the ranks of each host. `listener` is the descriptor of a listening socket, which is owned from now on; `token` the group's secret, and `tls` encrypts what leaves the host. `on_failure` is called once, when the group breaks here or a peer reports that it broke, in any thread. The sizes, equal on all ranks, are described in host_collectives.h.
        """

    def report(self, message: str, names: Sequence[int], timed_out: bool) -> None:
        """Breaks the group for all ranks; the first failure counts."""

    def check(self, operation: str) -> None:
        """Raises if the group has failed or one of this host's ranks has died."""

    def lost(self, ranks: Sequence[int]) -> Failure | None:
        """
        The failure for the first of `ranks` whose connection ended without a farewell.
        """

    def with_host(self, failure: Failure, peer: int) -> Failure:
        """
        Names also the ranks of a lost rank's host that cannot be reached either.
        """

    def close(self) -> None: ...

    def run(self, calls: Sequence[Collective], timeout_s: float, may_block: bool) -> Ticket:
        """
        Runs collectives; several are one call, of which none begins before all ranks agree on all.
        """

    def all_reduce(self, data: int, size_bytes: int, code: int, op: Op, source: int, timeout_s: float) -> None:
        """Runs an all_reduce of one tensor, blocking, by the shortest path."""

    def send(self, data: int, size_bytes: int, to: int, tag: int, code: int, timeout_s: float) -> Transfer: ...

    def receive(self, data: int, size_bytes: int, source: int, tag: int, code: int, timeout_s: float) -> Transfer:
        """Receives from `source`; from any rank if it is -1."""

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        """Waits for a send or receive; False: it is not done yet."""

class CallRows:
    """
    Rows that ranks exchange with each collective: a digest of the call, then a payload.
    """

    def __init__(self, ranks: int, payload_bytes: int) -> None: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def sent(self) -> int:
        """The address of the row to send."""

    @property
    def received(self) -> int:
        """The address of the rows of all ranks, in their order."""

    def write_bytes(self, digest: int, address: int, size_bytes: int) -> None:
        """Fills the row to send with a copy of the payload at an address."""

    def write_numbers(self, digest: int, numbers: Sequence[int]) -> None:
        """Fills the row to send with 64-bit integers as its payload."""

    def first_difference(self) -> int:
        """
        The first rank whose digest is not the one that was sent; -1 if there is none.
        """

    def digest(self, rank: int) -> int:
        """What a rank sent."""

    def numbers(self, count: int) -> list[list[int]]:
        """The first integers of each rank's payload."""

    def reduce(self, dtype: Dtype, op: Op, out: int, count: int) -> None:
        """Reduces the payloads in the order of ranks, into `out`."""

class TableOp(enum.Enum):
    """What a worker does with rows."""

    pull = 0

    push = 1

    set = 2

    pull_rows = 3

    set_rows = 4

class RuleKind(enum.Enum):
    """What a push does to a row."""

    add = 0

    sgd = 1

    adagrad = 2

    rowwise_adagrad = 3

    adam = 4

class InitKind(enum.Enum):
    """The initial value of keys."""

    zeros = 0

    constant = 1

    uniform = 2

    normal = 3

class Techniques(enum.Enum):
    """How keys come to the nodes that need them."""

    all = 0

    replication_only = 1

    relocation_only = 2

class TableStat(enum.Enum):
    """What a node counts."""

    local_pulls = 0

    remote_pulls = 1

    local_pushes = 2

    remote_pushes = 3

    local_sets = 4

    remote_sets = 5

    sent_bytes = 6

    received_bytes = 7

    sent_messages = 8

    received_messages = 9

    relocations = 10

    replicas_made = 11

    refreshes = 12

    forwards = 13

    parked = 14

    evictions = 15

    protocol_errors = 16

    duplicates = 17

    rounds = 18

    replicas = 19

    round_ns = 20

    refresh_age_ns = 21

def table_dtypes() -> list[Dtype]:
    """The element types that a table can have."""

class UpdateRule:
    """See parameters.UpdateRule."""

    def __init__(self, *, kind: RuleKind, learning_rate: float, eps: float, beta1: float, beta2: float, weight_decay: float, initial_accumulator: float) -> None: ...

class KeyInit:
    """See parameters.KeyInit."""

    def __init__(self, *, kind: InitKind, a: float, b: float, seed: int) -> None: ...

class StoreSpec:
    """What a node's part of a table is made for."""

    def __init__(self, *, lengths: Sequence[int], num_keys: int, capacity: int, dtype: Dtype, rule: UpdateRule, init: KeyInit, node: int, num_nodes: int, num_channels: int) -> None: ...

class ChannelOptions:
    """How a node's channels work."""

    def __init__(self, *, techniques: Techniques, max_rounds_per_s: float, sync_threshold: float, hysteresis_rounds: int, heartbeat_interval_s: float, heartbeat_timeout_s: float) -> None: ...

class ParameterStore:
    """A node's part of a parameter table, in shared memory."""

    @staticmethod
    def create(spec: StoreSpec) -> ParameterStore: ...

    @staticmethod
    def attach(address: str, init: KeyInit) -> ParameterStore: ...

    @property
    def address(self) -> str: ...

    def has_heard(self, node: int) -> bool: ...

    def elements(self, whole_rows: bool, keys: int, count: int) -> int: ...

    def owned_keys(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    def set_learning_rate(self, rate: float) -> None: ...

    def set_step(self, step: float) -> None: ...

    def holds(self, keys: int, count: int) -> bool: ...

    def nearest_local(self, keys: int, count: int, low: int, high: int, taken: Sequence[int], distinct: bool, drawable: int = 0) -> int: ...

    def check_leader(self) -> None: ...

    def abort_membership(self) -> None: ...

    def lose_worker(self, worker: int) -> None: ...

    def lose_node(self, node: int) -> None: ...

    def dead_workers(self) -> list[int]: ...

    def stats(self) -> dict[TableStat, int]: ...

class NodeService:
    """The threads that answer other nodes and move keys."""

    def __init__(self, store: ParameterStore, network: Network, options: ChannelOptions) -> None: ...

    @property
    def addresses(self) -> list[str]: ...

    def start(self, addresses: Sequence[str]) -> None: ...

    def stop(self) -> None: ...

class ParameterWorker:
    """One worker's access to the whole table."""

    def __init__(self, store: ParameterStore, worker_id: int, network: Network | None, addresses: Sequence[str], timeout_s: float, max_unfinished: int, max_message_bytes: int = 1073741824) -> None: ...

    def access(self, op: TableOp, keys: int, count: int, values: int, size_bytes: int, wait: bool, held: object | None) -> int: ...

    def pull_if_local(self, keys: int, count: int, values: int, size_bytes: int) -> bool: ...

    def wait(self, timestamp: int) -> None: ...

    def wait_all(self) -> None: ...

    def is_finished(self, timestamp: int) -> bool: ...

    @property
    def unfinished(self) -> int: ...

    def intent(self, keys: int, count: int, start: int, end: int) -> None: ...

    def advance_clock(self) -> int: ...

    @property
    def clock(self) -> int: ...

    def wait_sync(self) -> None: ...

    def finalize(self) -> None: ...

SWITCH_UDP_PORT: int = 48864

SWITCH_NUM_UDP_PORTS: int = 16

SWITCH_MAX_NUMEL: int = 256

SWITCH_CONTROL_TYPE: int = 2

SWITCH_XDP_MAX_WORKERS: int = 64

SWITCH_XDP_MAX_PORTS: int = 64

class SwitchControlKind(enum.IntEnum):
    """Kinds of control messages."""

    JOIN = 1

    JOINED = 2

    REFUSED = 3

    UNKNOWN_SESSION = 4

    COALESCED = 5

    LEAVE = 6

    ASK_MISSING = 7

    MISSING = 8

    BUSY = 9

    ALIVE = 10

class SwitchTableShape:
    """What a session's slots are made for."""

    def __init__(self, num_workers: int, num_slots: int, numel: int, sequenced: bool) -> None: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def numel(self) -> int: ...

    @property
    def sequenced(self) -> bool: ...

def switch_stats() -> dict[str, str]:
    """
    What a switch counts, with the meanings; SWITCH_NUM_SESSION_STATS of them for each session too.
    """

SWITCH_NUM_SESSION_STATS: int = 8

class SwitchWorkerCounts:
    """Packets of one worker of a session."""

    @property
    def rank(self) -> int: ...

    @property
    def received(self) -> int: ...

    @property
    def retransmissions(self) -> int: ...

    @property
    def silent_s(self) -> float: ...

class SwitchSessionInfo:
    """One session of a switch."""

    @property
    def id(self) -> int: ...

    @property
    def shape(self) -> SwitchTableShape: ...

    @property
    def counts(self) -> dict[str, int]: ...

    @property
    def workers(self) -> list[SwitchWorkerCounts]: ...

class UdpSwitch:
    """An aggregation switch on a UDP socket, with a thread of its own."""

    def __init__(self, address: str, port: int, drop_ingress: float = 0.0, drop_egress: float = 0.0, drop_seed: int = 0) -> None: ...

    @property
    def port(self) -> int: ...

    def open_session(self, id: int, shape: SwitchTableShape, uplink: int = -1) -> None: ...

    def close_session(self, id: int) -> None: ...

    def add_worker(self, id: int, rank: int, ip: int, first_port: int, num_ports: int) -> None: ...

    def receive_control(self, timeout_s: float) -> tuple[bytes, int, int, int] | None:
        """
        The next control message, its sender's address and port, and the switch's port; no bytes: a stranger's data packet.
        """

    def send_control(self, message: bytes, ip: int, port: int, switch_port: int) -> None: ...

    def stats(self) -> dict[str, int]: ...

    def sessions(self) -> list[SwitchSessionInfo]: ...

    def missing(self, id: int) -> list[int]: ...

    def stop(self) -> None: ...

class SwitchStreamStats:
    """Packets of a worker."""

    @property
    def sent(self) -> int:
        """Retransmissions included."""

    @property
    def results(self) -> int: ...

    @property
    def retransmissions(self) -> int: ...

class SwitchRetryPolicy:
    """When packets are sent again."""

    def __init__(self, timeout_s: float = 0.01, threshold: int = 100, increment: int = 100) -> None: ...

class SwitchWorkerStats:
    """What a worker has done."""

    @property
    def jobs(self) -> int: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def exact_chunks(self) -> int: ...

    @property
    def busy_s(self) -> float: ...

    @property
    def packets(self) -> SwitchStreamStats: ...

class SwitchWorker:
    """Sums arrays over the workers of a session, through a switch."""

    def __init__(self, sockets: Sequence[int], switch_name: str, rank: int, num_workers: int, numel: int, max_outstanding: int, retry: SwitchRetryPolicy) -> None: ...

    def all_reduce(self, values: int, count: int, dtype: Dtype, timeout_s: float) -> None: ...

    def stats(self) -> SwitchWorkerStats: ...

    def close(self) -> None: ...
