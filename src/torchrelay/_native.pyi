"""
The native core: memory, reductions and messages. Knows neither torch nor the rooms.
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

class Endpoint:
    """Sends and receives messages; threads take turns."""

    @property
    def address(self) -> str: ...

    def connect(self, peer: int, address: str) -> None: ...

    def disconnect(self, peer: int) -> None: ...

    def send(self, peer: int, data: bytes) -> None: ...

    def receive(self, timeout_s: float) -> bytes | None: ...

class Network:
    """Opens endpoints."""

    def open(self, label: str) -> Endpoint: ...

class MemoryNetwork(Network):
    """Endpoints of one process; delays, reorders and duplicates on demand."""

    def __init__(self, max_delay_s: float = 0.0, duplicate_probability: float = 0.0, seed: int = 0) -> None: ...

    def cut(self, label: str) -> None: ...

class DelayedNetwork(Network):
    """Another network, whose messages it delays, reorders and duplicates."""

    def __init__(self, network: Network, max_delay_s: float = 0.0, duplicate_probability: float = 0.0, seed: int = 0) -> None: ...

class TcpNetwork(Network):
    """Endpoints over plain sockets; see transport.plain_network."""

    def __init__(self, *, token: bytes, interface: str = '127.0.0.1', max_message_bytes: int = 1073741824, local_sockets: bool = True, silence_s: float = 10.0, linger_s: float = 1.0, spin_s: float = 0.0) -> None: ...

    @property
    def ignored_connections(self) -> int: ...

class ZmqNetwork(Network):
    """Endpoints over ZeroMQ; see transport.zmq_network."""

    def __init__(self, library_path: str, *, token: bytes, interface: str = '127.0.0.1', max_message_bytes: int = 1073741824, local_sockets: bool = True, heartbeat_s: float = 2.0, silence_s: float = 10.0, linger_s: float = 1.0, spin_s: float = 0.0, io_threads: int = 1, curve_public_key: str = '', curve_secret_key: str = '') -> None: ...

    @property
    def ignored_messages(self) -> int: ...

def twister_polynomial(distance: int) -> bytes:
    """
    x to the distance, modulo the characteristic polynomial of mt19937: 2496 bytes for twister_jump.
    """

def twister_jump(state: Annotated[NDArray[numpy.uint32], dict(shape=(624), order='C', device='cpu')], polynomial: bytes) -> None:
    """
    Replaces the 624 words of state by those distance words on; polynomial is that of distance - 1.
    """

class ParameterStore:
    """A node's part of a parameter table, in shared memory."""

    @staticmethod
    def create(lengths: Sequence[int], num_keys: int, capacity: int, element: int, rule: int, rule_numbers: Sequence[float], init: int, init_a: float, init_b: float, init_seed: int, node: int, num_nodes: int, num_channels: int) -> ParameterStore: ...

    @staticmethod
    def attach(address: str, init: int, init_a: float, init_b: float, init_seed: int) -> ParameterStore: ...

    @property
    def address(self) -> str: ...

    @property
    def node(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_channels(self) -> int: ...

    def length_of(self, key: int) -> int: ...

    def valid(self, key: int) -> bool: ...

    def has_heard(self, node: int) -> bool: ...

    def elements(self, whole_rows: bool, keys: int, count: int) -> int: ...

    def owned_keys(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    def set_learning_rate(self, rate: float) -> None: ...

    def nearest_local(self, keys: int, count: int, low: int, high: int, taken: Sequence[int], distinct: bool) -> int: ...

    def check_leader(self) -> None: ...

    def dead_workers(self) -> list[int]: ...

    def counters(self) -> dict[str, int]: ...

class NodeService:
    """The threads that answer other nodes and move keys."""

    def __init__(self, store: ParameterStore, network: Network, techniques: int, max_rounds_per_s: float, sync_threshold: float, hysteresis_rounds: int, heartbeat_interval_s: float, heartbeat_timeout_s: float) -> None: ...

    @property
    def addresses(self) -> list[str]: ...

    def start(self, addresses: Sequence[str]) -> None: ...

    def stop(self) -> None: ...

class ParameterWorker:
    """One worker's access to the whole table."""

    def __init__(self, store: ParameterStore, worker_id: int, network: Network | None, addresses: Sequence[str], timeout_s: float, max_unfinished: int) -> None: ...

    def access(self, op: int, keys: int, count: int, values: int, size_bytes: int, wait: bool, held: object | None) -> int: ...

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

    def flush_updates(self) -> None: ...

    def flush_refreshes(self) -> None: ...

    def finalize(self) -> None: ...

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

    def error(self) -> tuple[int, str, list[int]] | None:
        """What it failed with (code, message, ranks), or None."""

    def when_done(self, function: Callable[[], None]) -> None: ...

class Transfer:
    """A send or receive in progress."""

    @property
    def ticket(self) -> Ticket: ...

    @property
    def source(self) -> int: ...

class Dtype(enum.Enum):
    int8 = 0

    uint8 = 1

    int16 = 2

    int32 = 3

    int64 = 4

    float16 = 5

    bfloat16 = 6

    float32 = 7

    float64 = 8

class Op(enum.Enum):
    SUM = 0

    AVG = 1

    PRODUCT = 2

    MIN = 3

    MAX = 4

    BAND = 5

    BOR = 6

    BXOR = 7

def instruction_sets() -> list[str]:
    """What reductions can use on this machine, the best first."""

def reduce(sources: Sequence[int], out: int, count: int, dtype: Dtype, op: Op, instruction_set: str) -> None:
    """Reduces `count` elements of each source into out."""

class Communicator:
    """One rank's part in a group of ranks of one host."""

    def __init__(self, memory: SharedMemory, rank: int, names: Sequence[int], spin_s: float, yield_s: float) -> None: ...

    @staticmethod
    def create_segment(size: int, slot_bytes: int, one_shot_bytes: int, mailbox_bytes: int) -> SharedMemory: ...

    def join(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...

    def all_reduce(self, data: int, count: int, dtype: Dtype, op: Op, timeout_s: float, block: bool) -> Ticket: ...

    def reduce(self, data: int, count: int, dtype: Dtype, op: Op, root: int, timeout_s: float, block: bool) -> Ticket: ...

    def reduce_scatter(self, inputs: Sequence[int], output: int, count: int, dtype: Dtype, op: Op, timeout_s: float, block: bool) -> Ticket: ...

    def broadcast(self, data: int, size_bytes: int, code: int, root: int, timeout_s: float, block: bool) -> Ticket: ...

    def all_gather(self, input: int, size_bytes: int, outputs: Sequence[tuple[int, int]], code: int, timeout_s: float, block: bool) -> Ticket: ...

    def gather(self, input: int, size_bytes: int, outputs: Sequence[tuple[int, int]], code: int, root: int, timeout_s: float, block: bool) -> Ticket: ...

    def scatter(self, inputs: Sequence[tuple[int, int]], output: int, size_bytes: int, code: int, root: int, timeout_s: float, block: bool) -> Ticket: ...

    def all_to_all(self, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]], code: int, timeout_s: float, block: bool) -> Ticket: ...

    def barrier(self, timeout_s: float, block: bool) -> Ticket: ...

    def send(self, data: int, size_bytes: int, to: int, tag: int, code: int, timeout_s: float) -> Transfer: ...

    def receive(self, data: int, size_bytes: int, source: int, tag: int, code: int, timeout_s: float) -> Transfer: ...

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool: ...

    @property
    def jobs(self) -> int: ...

    @property
    def waiting_ns(self) -> int: ...
