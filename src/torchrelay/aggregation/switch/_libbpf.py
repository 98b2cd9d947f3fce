"""The part of libbpf that loads the switch, through ctypes; the library is opened at first use.

Programs are attached by links, which end with the process, whatever ends it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchrelay._resource import Resource
from torchrelay.errors import ConfigError, UnavailableError

__all__ = ["BpfMap", "BpfObject"]

_ATTACH_XDP = 37  # enum bpf_attach_type
_FLAGS = {"generic": 2, "native": 4}  # XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE
_LINK_OPTIONS = struct.Struct("@NI4x")  # the begin of struct bpf_link_create_opts: size, flags
_PRIVILEGE = "XDP needs root, or the capabilities CAP_BPF and CAP_NET_ADMIN"


class _PortEntry(ctypes.Structure):  # struct bpf_devmap_val
    _fields_ = (("ifindex", ctypes.c_uint32), ("program", ctypes.c_uint32))


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise UnavailableError(
            f"XDP needs libbpf 1.0 or newer ({error}); on Debian: apt install libbpf1"
        ) from error
    for name in ("open_file", "find_program_by_name", "find_map_by_name"):
        getattr(library, f"bpf_object__{name}").restype = ctypes.c_void_p
    library.bpf_map__initial_value.restype = ctypes.c_void_p
    library.libbpf_set_print(None)  # errors are raised here
    return library


class BpfMap:
    """A map of a loaded object: values by key, each a copy of the kernel's."""

    def __init__(self, library: ctypes.CDLL, descriptor: int, value: type[Any]) -> None:
        self._library, self._descriptor, self._value = library, descriptor, value

    def __getitem__(self, key: Any) -> Any:
        value = self._value()
        self._check(self._library.bpf_map_lookup_elem, key, ctypes.byref(value))
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        flags = ctypes.c_uint64(0)
        self._check(self._library.bpf_map_update_elem, key, ctypes.byref(value), flags)

    def discard(self, key: Any) -> None:
        """Delete an entry of a hash map, if it is there."""
        self._library.bpf_map_delete_elem(self._descriptor, ctypes.byref(key))

    def _check(self, call: Callable[..., int], key: Any, *more: object) -> None:
        if call(self._descriptor, ctypes.byref(key), *more):
            raise UnavailableError(
                f"XDP: an entry of a map cannot be accessed: {os.strerror(ctypes.get_errno())}"
            )


class BpfObject(Resource):
    """The programs and maps of an object file, until :meth:`close`.

    Args:
        path: the object file.
        sizes: maps whose number of entries is set before loading.
        constants: the bytes of the program's constants (its section ``.rodata``).

    Raises:
        UnavailableError: libbpf, the privilege, memory, or a feature of the kernel is missing.
    """

    def __init__(self, path: Path, sizes: dict[str, int], constants: bytes) -> None:
        self._library, self._path = _library(), path
        self._links: list[int] = []
        self._object = self._library.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            raise UnavailableError(f"XDP: {path} cannot be read: {os.strerror(ctypes.get_errno())}")
        for name, size in sizes.items():
            self._library.bpf_map__set_max_entries(self._find("map", name), size)
        rodata = self._find("map", ".rodata")
        initial = self._library.bpf_map__initial_value(rodata, ctypes.byref(ctypes.c_size_t()))
        ctypes.memmove(initial, constants, len(constants))
        error = -self._library.bpf_object__load(ctypes.c_void_p(self._object))
        if error:
            self.close()
            why = (
                _PRIVILEGE
                if error in (1, 13)
                else "the kernel does not take the program: it needs Linux 5.14"
            )
            raise UnavailableError(f"XDP: {os.strerror(error)}; {why}")

    def _find(self, kind: str, name: str) -> ctypes.c_void_p:
        find = getattr(self._library, f"bpf_object__find_{kind}_by_name")
        return ctypes.c_void_p(find(ctypes.c_void_p(self._object), name.encode()))

    def map(self, name: str, key: Any, value: Any, *, per_cpu: bool = False) -> BpfMap:
        """Return a map.

        Args:
            key, value: the ctypes types of its entries.
            per_cpu: an entry is an array of ``value``, one for each CPU.

        Raises:
            UnavailableError: the program has keys or values of other sizes.
        """
        at = self._find("map", name)
        found = (self._library.bpf_map__key_size(at), self._library.bpf_map__value_size(at))
        expected = (ctypes.sizeof(key), ctypes.sizeof(value))
        if found != expected:
            raise UnavailableError(
                f"XDP: {self._path} is of another version: its map {name} has keys and values of "
                f"{found} bytes, not {expected}; build torchrelay again"
            )
        entry = value * self._library.libbpf_num_possible_cpus() if per_cpu else value
        return BpfMap(self._library, self._library.bpf_map__fd(at), entry)

    def attach(self, interfaces: Mapping[int, str], mode: str) -> None:
        """Run the switch at the ports, whose names are given by index.

        Args:
            mode: as of :class:`XdpDataPlane`.

        Raises:
            ConfigError: there is no such mode.
            UnavailableError: the program cannot be attached.
        """
        if mode not in _FLAGS:
            raise ConfigError(f"XDP: mode {mode!r}; there are {', '.join(_FLAGS)}")
        options = _LINK_OPTIONS.pack(_LINK_OPTIONS.size, _FLAGS[mode])
        ports = self.map("ports", ctypes.c_uint32, _PortEntry)
        switch, port = (
            self._library.bpf_program__fd(self._find("program", f"torchrelay_{name}"))
            for name in ("switch", "port")
        )
        for place, (ifindex, name) in enumerate(interfaces.items()):
            ports[ctypes.c_uint32(place)] = _PortEntry(ifindex, port)
            link = self._library.bpf_link_create(switch, ifindex, _ATTACH_XDP, options)
            if link < 0:
                error = ctypes.get_errno()
                why = "another XDP program is there" if error == errno.EBUSY else f"no mode {mode}"
                raise UnavailableError(f"XDP: interface {name}: {os.strerror(error)}; {why}")
            self._links.append(link)

    def close(self) -> None:
        """Detach the programs, and free programs and maps. Idempotent."""
        for link in self._links:
            os.close(link)
        self._links = []
        if self._object:
            self._library.bpf_object__close(ctypes.c_void_p(self._object))
            self._object = None
