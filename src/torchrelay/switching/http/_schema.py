"""The bodies of requests, as typed structs: an error names its field, null is as good as absent."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from typing import Annotated, Any, TypeVar, cast

import msgspec

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.switching.http._messages import Request
from torchrelay.switching.models._tensors import TensorEntry, split_body

__all__ = [
    "InferRequest",
    "LoadRequest",
    "ReadyFilter",
    "UnloadRequest",
    "asked_of",
    "parse",
    "sentence",
]

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MAX_INT = (1 << 63) - 1


class TensorParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Of an input."""

    binary_data_size: int | None = None


class Tensor(msgspec.Struct):
    """An input."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: TensorParameters | None = None

    @property
    def entry(self) -> TensorEntry:
        size = None if self.parameters is None else self.parameters.binary_data_size
        return TensorEntry(self.name, self.datatype, self.shape, self.data, size)


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Of an output that is asked for."""

    binary_data: bool | None = None


class Output(msgspec.Struct):
    """An output that is asked for."""

    name: str
    parameters: OutputParameters | None = None


class InferParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Of a request. `timeout` is in microseconds, and 0 is no limit, as in Triton."""

    priority: int | None = None
    timeout: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)] | None = None
    binary_data_output: bool | None = None


class InferRequest(msgspec.Struct):
    """The body of `infer`."""

    inputs: list[Tensor]
    id: str | int | None = None
    outputs: list[Output] | None = None
    parameters: InferParameters | None = None


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Of a load: a request never brings code or configuration."""


class LoadRequest(msgspec.Struct):
    """The body of `load`, which may be empty."""

    parameters: NoParameters | None = None


class UnloadParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Of an unload; no model depends on another one."""

    unload_dependents: bool | None = None


class UnloadRequest(msgspec.Struct):
    """The body of `unload`, which may be empty."""

    parameters: UnloadParameters | None = None


class ReadyFilter(msgspec.Struct):
    """The body of the repository's index, which may be empty."""

    ready: bool | None = None


@functools.cache
def _decoder_of(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cast(Any, kind))


def parse(
    kind: type[T], body: bytes | bytearray, header_length: str | None
) -> tuple[T, memoryview]:
    """Return the JSON of a body as a `kind`, and the bytes behind it.

    Raises:
        ArgumentError: it is not of the protocol's form.
        CapacityError: its JSON is too large.
        UnsupportedError: it asks for something that this server would have to ignore.
    """
    text, raw = split_body(body, header_length)
    try:
        found: T = _decoder_of(cast(Hashable, kind)).decode(text)
        return found, raw
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.match(str(error))
        if unknown is None:
            raise ArgumentError(f"the body's JSON: {sentence(error)}") from error
        where = sentence(error).partition(":")[0]
        raise UnsupportedError(f"{where}: {unknown[1]!r} is not supported: leave it out") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the body's JSON cannot be read: {error}") from error


async def asked_of(request: Request, kind: type[T]) -> T:
    """Return the JSON object of a body, which is empty where there is none. Raises as above."""
    return parse(kind, await request.body() or b"{}", None)[0]


def sentence(error: msgspec.ValidationError) -> str:
    """Return the error with its field first."""
    text, _, path = str(error).partition(" - at `$")
    return f"{path.rstrip('`').lstrip('.')}: {text}" if path else text
