"""What models keep of sequences, keys and values above all: in transformers' caches, one sequence
or several in rows, and in stashes, which are memory of the host that outlives a worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from torchrelay.buffers import Segment
from torchrelay.errors import UnsupportedError
from torchrelay.switching.device._contract import align
from torchrelay.switching.generate._messages import KvShape, LayerShape, TensorShape

__all__ = [
    "Stash",
    "arguments_of",
    "check_cache",
    "given_to",
    "has_columns",
    "is_recurrent",
    "new_cache",
    "shape_of",
    "split",
    "stack",
]

_KNOWN = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
_NOTHING: TensorShape = (0,), torch.uint8
_reader = ThreadPoolExecutor(1, "torchrelay-stash")  # its thread starts with the first stash


def new_cache(config: Any) -> Any:
    """Return an empty cache for a model of `config`."""
    return DynamicCache(config=config)


def arguments_of(module: torch.nn.Module) -> Collection[str]:
    """Return the names of the arguments that the model takes."""
    return inspect.signature(type(module).forward).parameters.keys()


def given_to(taken: Collection[str], ids: torch.Tensor, cache: Any) -> dict[str, Any]:
    """Return the arguments of a call that adds the tokens `ids` to `cache`, to a model whose
    arguments have the names `taken`.
    """
    name = "cache" if "cache" in taken else "past_key_values"  # until transformers 5.23
    return {"input_ids": ids, "use_cache": True, name: cache}


def check_cache(config: Any) -> None:
    """Raise :class:`UnsupportedError` unless what the model keeps of a sequence is known here."""
    for layer in new_cache(config).layers:
        if type(layer).__name__ not in _KNOWN or type(layer).__module__ != cache_utils.__name__:
            raise UnsupportedError(
                f"a {config.model_type} keeps a {type(layer).__name__}; only models whose layers "
                f"keep one of {', '.join(_KNOWN)} can be switched between tokens"
            )


def is_recurrent(cache: Any) -> bool:
    """Return whether there are states that each token changes."""
    return any(hasattr(layer, "recurrent_states") for layer in cache.layers)


def has_columns(cache: Any) -> bool:
    """Return whether there are keys and values, a column for each token."""
    return any(map(_has_keys, cache.layers))


def shape_of(cache: Any, capacity: int) -> KvShape:
    """Return the shape of a stash for one sequence of up to `capacity` tokens.

    Raises:
        UnsupportedError: the model has left the cache empty.
    """
    layers = []
    for layer in cache.layers:
        states = tuple(
            _NOTHING if kept[i] is None else (tuple(kept[i].shape[1:]), kept[i].dtype)
            for kept, i in _states(layer)
        )
        if _has_keys(layer):
            parts = [(one.shape[1], one.shape[3]) for one in (layer.keys, layer.values)]
            layers.append(LayerShape(parts[0], parts[1], layer.keys.dtype, states))
        else:
            layers.append(LayerShape((0, 0), (0, 0), torch.uint8, states))
    has_none = any(one.states and set(one.states) == {_NOTHING} for one in layers)
    if has_none or not any(one.states or one.keys[0] for one in layers):
        raise UnsupportedError(
            "the model keeps what it needs of a sequence elsewhere than in the cache that it is "
            "given, so it cannot be switched between tokens"
        )
    return KvShape(tuple(layers), capacity)


class Stash:
    """What is kept of one sequence, in memory of the host that processes share.

    Token i of a head is row i, so that a sequence that has grown adds rows and changes none: what
    was reported as stashed stays valid, whatever happens to its writer. States, which every token
    changes, are there twice, of which a writer replaces the older. Memory is taken as it is
    written.
    """

    def __init__(self, segment: Segment, shape: KvShape) -> None:
        self.segment = segment
        self.shape = shape
        self.tokens = 0  # that are there
        found, offset = [], 0
        for size, dtype in shape.tensors:
            found.append(segment.tensor(size, dtype, offset))
            offset += align(found[-1].nbytes)
        count = 2 * len(shape.layers)
        self._parts = list(zip(found[:count:2], found[1:count:2], strict=True))
        self._ends = found[count]  # the tokens that each copy of the states is of
        states = iter(found[count + 1 :])
        self._states = [[[next(states) for _ in one.states] for one in shape.layers] for _ in "01"]

    @classmethod
    def create(cls, shape: KvShape) -> Stash:
        """Create an empty stash.

        Raises:
            SegmentError: the kernel refuses.
        """
        empty = (torch.empty(size, dtype=dtype, device="meta") for size, dtype in shape.tensors)
        return cls(
            Segment.create(sum(align(one.nbytes) for one in empty), "torchrelay-stash"), shape
        )

    @classmethod
    def open(cls, descriptor: int, shape: KvShape, tokens: int) -> Stash:
        """Map a stash of `tokens` tokens; the caller closes the descriptor."""
        made = cls(Segment.from_fd(descriptor), shape)
        made.tokens = tokens
        return made

    def write(self, cache: Any, end: int) -> None:
        """Add what `cache`, of the one sequence and `end` tokens, has more."""
        older = 0 if self._ends[1] == self.tokens else 1
        self._ends[older] = -1
        for layer, parts, kept in zip(cache.layers, self._parts, self._states[older], strict=True):
            if _has_keys(_arrived(layer)):
                start = max(self.tokens, end - layer.keys.shape[-2])  # a window keeps the last ones
                for part, source in zip(parts, (layer.keys, layer.values), strict=True):
                    part[:, start:end].copy_(source[0, :, source.shape[-2] - (end - start) :])
            for (states, i), target in zip(_states(layer), kept, strict=True):
                if target.numel():
                    target.copy_(states[i][0])
        self._ends[older] = end
        self.tokens = end

    def read(self, cache: Any, device: torch.device) -> int:
        """Fill `cache`, which is empty, with what is stashed; return of how many tokens: none if a
        writer died as it replaced the states.

        Keys and values arrive meanwhile, layer by layer: the model waits for those that it needs.
        """
        newer = 0 if self._ends[0] == self.tokens else 1
        if is_recurrent(cache) and self._ends[newer] != self.tokens:
            self.tokens = 0
            return 0
        for layer, parts, kept in zip(cache.layers, self._parts, self._states[newer], strict=True):
            _set_states(layer, [one[None].to(device, copy=True) for one in kept])
            if parts[0].numel():
                start = _first(layer, self.tokens)
                found = [one[None, :, start : self.tokens] for one in parts]
                copied = _reader.submit(_copied, found, device)
                _set_late(layer, found, device, copied.result, self.tokens)
        return self.tokens


def stack(config: Any, caches: Sequence[Any], tokens: int) -> Any:
    """Return a cache whose rows are those of `caches`, of one sequence each. All end at column
    `tokens`: shorter ones begin with zeros, which a mask must hide.
    """
    if len(caches) == 1:
        return caches[0]
    made = new_cache(config)
    for layer, sources in zip(
        made.layers, zip(*(one.layers for one in caches), strict=True), strict=True
    ):
        if _has_keys(sources[0]):
            width, first = tokens - _first(layer, tokens), sources[0]
            shaped = [
                one[:, :, :1].expand(len(sources), -1, width, -1)
                for one in (first.keys, first.values)
            ]
            make = partial(_stacked, sources, width)
            _set_late(layer, shaped, shaped[0].device, make, tokens)
        rows = zip(*(_states(one) for one in sources), strict=True)
        _set_states(layer, [_joined([kept[i] for kept, i in row]) for row in rows])
    return made


def split(config: Any, stacked: Any, lengths: Sequence[int]) -> Iterator[Any]:
    """Yield a cache for each row of `stacked`, which it views, of as many tokens as `lengths`
    says.
    """
    for row, tokens in enumerate(lengths):
        cache = new_cache(config)
        for layer, source in zip(cache.layers, stacked.layers, strict=True):
            if _has_keys(_arrived(source)):
                first = source.keys.shape[-2] - (tokens - _first(layer, tokens))
                one = slice(row, row + 1), slice(None), slice(max(0, first), None)
                _set(layer, source.keys[one], source.values[one], tokens)
            found = [kept[i] for kept, i in _states(source)]
            _set_states(layer, [one if one is None else one[row : row + 1] for one in found])
        yield cache


def _first(layer: Any, tokens: int) -> int:
    """Return the first of `tokens` tokens that the layer keeps."""
    return max(0, tokens - layer.sliding_window + 1) if layer.is_sliding else 0


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _set(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if layer.is_sliding:
        layer.cumulative_length = tokens


def _set_late(
    layer: Any,
    shaped: Sequence[torch.Tensor],
    device: torch.device,
    make: Callable[[], Sequence[torch.Tensor]],
    tokens: int,
) -> None:
    """Let the layer have what `make` returns once it is needed; until then, no more than the shapes
    of these, which are those of `shaped`.
    """
    keys, values = (
        torch.empty((), dtype=one.dtype, device=device).expand(one.shape) for one in shaped
    )
    _set(layer, keys, values, tokens)

    def update(*args: Any, **kwargs: Any) -> Any:
        return _arrived(layer).update(*args, **kwargs)

    layer.make, layer.update = make, update


def _arrived(layer: Any) -> Any:
    """Return the layer, once it has its keys and values."""
    make = layer.__dict__.pop("make", None)
    if make is not None:
        del layer.update
        layer.keys, layer.values = make()
    return layer


def _copied(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies on `device`, beside what it computes."""
    if device.type != "cuda":
        return [one.to(device, copy=True) for one in parts]
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        found = [one.to(device, copy=True) for one in parts]
    stream.synchronize()
    for one in found:
        one.record_stream(torch.cuda.default_stream(device))
    return found


def _stacked(sources: Sequence[Any], width: int) -> list[torch.Tensor]:
    pairs = zip(*((_arrived(one).keys, one.values) for one in sources), strict=True)
    return [torch.cat([_widened(one, width) for one in parts]) for parts in pairs]


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, 0, width - part.shape[-2], 0))


def _states(layer: Any) -> list[tuple[dict[int, Any], int]]:
    """Return where the layer keeps states: tensors, or None where it has none."""
    kinds = [layer.conv_states, layer.recurrent_states] if hasattr(layer, "conv_states") else []
    return [(kept, i) for kept in kinds for i in kept]


def _set_states(layer: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    for (kept, i), state in zip(_states(layer), tensors, strict=True):
        if state is None or not state.numel():
            continue
        kept[i] = state
        layer.device, layer.dtype = state.device, state.dtype
        if kept is layer.conv_states:
            layer.is_conv_states_initialized[i] = layer.has_previous_state[i] = True
            layer.conv_kernel_size[i] = state.shape[-1]
        else:
            layer.is_recurrent_states_initialized[i] = True


def _joined(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return None if states[0] is None else torch.cat([one for one in states if one is not None])
