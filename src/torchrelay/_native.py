"""The native core where it was not built: Python does what `deferred`, `checkpoint` and `mpi` over
MPI need, and the rest is refused when it is called.

Python finds the extension module of this name first, if it is in this folder. Types, and what the
core's enumerations contain, are in ``_native.pyi``.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torchrelay._platform import anonymous_file, need_core
from torchrelay._pure.checksums import (
    copy_memory,
    crc32c,
    crc32c_blocks,
    crc32c_of_file,
    crc32c_of_memory,
)
from torchrelay._pure.memory import Origin, SharedMemory
from torchrelay._pure.rows import CallRows
from torchrelay._pure.twister import twister_jump, twister_polynomial

__all__ = [
    "CallRows",
    "Origin",
    "SharedMemory",
    "anonymous_file",
    "copy_memory",
    "crc32c",
    "crc32c_blocks",
    "crc32c_of_file",
    "crc32c_of_memory",
    "reduces",
    "remedy",
    "switch_stats",
    "table_dtypes",
    "twister_jump",
    "twister_polynomial",
]


def reduces(dtype: object, op: object) -> bool:
    """Return False: there are no reductions."""
    return False


def table_dtypes() -> list[Any]:
    """Return nothing: there are no tables."""
    return []


def switch_stats() -> dict[str, str]:
    """Return nothing: there is no switch."""
    return {}


def remedy(error: int) -> str:
    """Return nothing: only what needs the native core asks."""
    return ""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        need_core(f"torchrelay._native.{name}")
        raise AssertionError

    return refuse


def _declared(node: ast.stmt) -> tuple[str, Any] | None:
    """Return what a statement of the stub declares: an enumeration, a number, or what refuses."""
    match node:
        case ast.ClassDef(
            name=name, bases=[ast.Attribute(attr="Enum" | "IntEnum" as kind)], body=body
        ):
            lines = [one for one in body if isinstance(one, ast.Assign)]
            members = [(ast.unparse(one.targets[0]), ast.literal_eval(one.value)) for one in lines]
            return name, getattr(enum, kind)(name, members, module=__name__)
        case ast.ClassDef(name=name, body=body):
            methods = [one.name for one in body if isinstance(one, ast.FunctionDef)]
            refused = {each: staticmethod(_refusal(f"{name}.{each}")) for each in methods}
            return name, type(name, (), {**refused, "__new__": _refusal(name)})
        case ast.FunctionDef(name=name):
            return name, _refusal(name)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
            return name, value
    return None


_stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
globals().update(
    {name: value for name, value in filter(None, map(_declared, _stub.body)) if name not in __all__}
)
