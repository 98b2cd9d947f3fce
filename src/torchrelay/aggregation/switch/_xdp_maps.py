"""The kernel's maps that ``native/bpf/switch.bpf.c`` shares with the control plane."""

from __future__ import annotations

import ctypes
import socket

from torchrelay import _native

__all__ = [
    "MAX_WORKERS",
    "SESSION_COUNTS",
    "MemberEntry",
    "PortEntry",
    "SessionEntry",
    "SlotEntry",
    "SourceKey",
    "WorkerEntry",
    "WorkerKey",
    "u32",
]

MAX_WORKERS, _MAX_NUMEL = 64, 256

SESSION_COUNTS = tuple(_native.switch_stats())[: _native.SWITCH_NUM_SESSION_STATS]

_u8, _u16, u32, _u64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64


class SourceKey(ctypes.Structure):
    _fields_ = (("ip", _u8 * 4), ("port", _u8 * 2), ("zero", _u16))

    @classmethod
    def of(cls, address: str, port: int) -> SourceKey:
        """Return the key of an address and one of its ports; 0 is all."""
        return cls.from_buffer_copy(socket.inet_aton(address) + port.to_bytes(2, "big") + bytes(2))


class MemberEntry(ctypes.Structure):
    _fields_ = (("session", u32), ("rank", u32))


class SessionEntry(ctypes.Structure):
    _fields_ = (
        ("heard_ns", _u64 * MAX_WORKERS),
        ("stats", _u64 * len(SESSION_COUNTS)),
        ("worker_received", _u64 * MAX_WORKERS),
        ("worker_again", _u64 * MAX_WORKERS),
        *((name, u32) for name in ("num_workers", "num_slots", "first_slot", "numel")),
        ("sequenced", u32),
        ("switch_ips", u32 * MAX_WORKERS),
        ("switch_ports", _u16 * MAX_WORKERS),
        ("pad", u32),
    )


class WorkerKey(ctypes.Structure):
    _fields_ = (("session", u32), ("ifindex", u32))


class WorkerEntry(ctypes.Structure):
    _fields_ = (
        ("mac", _u8 * 6),
        ("port_mac", _u8 * 6),
        ("ip", _u8 * 4),
        ("rank", u32),
        ("pad", u32),
    )


class SlotEntry(ctypes.Structure):
    _fields_ = (
        ("lock", u32),
        *((name, u32 * 2) for name in ("count", "tsi", "used")),
        ("exponents", ctypes.c_int32 * 2 * 2),
        ("pad", u32),
        ("bitmap", _u64 * 2),
        ("ports", _u16 * MAX_WORKERS * 2),
        ("values", ctypes.c_int32 * _MAX_NUMEL * 2),
    )


class PortEntry(ctypes.Structure):  # struct bpf_devmap_val
    _fields_ = (("ifindex", u32), ("program", u32))
