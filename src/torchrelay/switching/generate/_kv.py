"""The keys and values of sequences: in transformers' caches, one sequence or several in rows, and
in stashes, which are memory of the host that outlives a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from torchrelay.buffers import Segment
from torchrelay.errors import UnsupportedError
from torchrelay.switching.device._contract import align
from torchrelay.switching.generate._messages import KvShape, LayerShape

__all__ = ["Stash", "check_cache", "new_cache", "shape_of", "split", "stack"]


def new_cache(config: Any) -> Any:
    """Return an empty cache for a model of `config`."""
    return DynamicCache(config=config)


def check_cache(config: Any) -> None:
    """Raise :class:`UnsupportedError` unless the model's caches are of keys and values alone."""
    for layer in new_cache(config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(
                f"a {config.model_type} keeps a {type(layer).__name__}; only models whose layers "
                "keep keys and values can be switched between tokens"
            )


def shape_of(cache: Any, capacity: int) -> KvShape:
    """Return the shape of a stash for one sequence of up to `capacity` tokens."""
    layers = []
    for layer in cache.layers:
        if layer.is_initialized:
            parts = [(one.shape[1], one.shape[3]) for one in (layer.keys, layer.values)]
            layers.append(LayerShape(parts[0], parts[1], layer.keys.dtype))
        else:
            layers.append(LayerShape((0, 0), (0, 0), torch.uint8))
    return KvShape(tuple(layers), capacity)


class Stash:
    """The keys and values of one sequence, in memory of the host that processes share.

    Token i of a head is row i, so that a sequence that has grown adds rows and changes none: what
    was reported as stashed stays valid, whatever happens to its writer. Memory is taken as rows are
    written.
    """

    def __init__(self, segment: Segment, shape: KvShape) -> None:
        self.segment = segment
        self.shape = shape
        self.tokens = 0  # rows that are there
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (heads, capacity, size)
        offset = 0
        for layer in shape.layers:
            parts = []
            for heads, size in (layer.keys, layer.values):
                parts.append(segment.tensor((heads, shape.capacity, size), layer.dtype, offset))
                offset += align(parts[-1].nbytes)
            self._parts.append((parts[0], parts[1]))

    @classmethod
    def create(cls, shape: KvShape) -> Stash:
        """Create an empty stash.

        Raises:
            SegmentError: the kernel refuses.
        """
        sizes = [
            align(shape.capacity * size_bytes)
            for layer in shape.layers
            for size_bytes in layer.token_bytes
        ]
        return cls(Segment.create(max(1, sum(sizes)), "torchrelay-stash"), shape)

    @classmethod
    def open(cls, descriptor: int, shape: KvShape, tokens: int) -> Stash:
        """Map a stash of `tokens` tokens; the caller closes the descriptor."""
        made = cls(Segment.from_fd(descriptor), shape)
        made.tokens = tokens
        return made

    def write(self, cache: Any) -> None:
        """Add the tokens that `cache`, of the one sequence, has more."""
        end = cache.get_seq_length()
        for layer, parts in zip(cache.layers, self._parts, strict=True):
            if not layer.is_initialized:
                continue
            start = max(self.tokens, end - layer.keys.shape[-2])  # a window keeps the last ones
            for part, source in zip(parts, (layer.keys, layer.values), strict=True):
                part[:, start:end].copy_(source[0, :, source.shape[-2] - (end - start) :])
        self.tokens = end

    def read(self, cache: Any, device: torch.device) -> None:
        """Fill `cache`, which is empty, with what is stashed."""
        for layer, (keys, values) in zip(cache.layers, self._parts, strict=True):
            if not keys.numel():
                continue
            start = _first(layer, self.tokens)
            found = [
                one[None, :, start : self.tokens].to(device, copy=True) for one in (keys, values)
            ]
            _set(layer, found[0], found[1], self.tokens)


def stack(config: Any, caches: Sequence[Any]) -> Any:
    """Return a cache whose rows are those of `caches`, of one sequence each. All end at the same
    column: shorter ones begin with zeros, which a mask must hide.
    """
    if len(caches) == 1:
        return caches[0]
    made = new_cache(config)
    tokens = max(one.get_seq_length() for one in caches)
    for layer, sources in zip(
        made.layers, zip(*(one.layers for one in caches), strict=True), strict=True
    ):
        if sources[0].is_initialized:
            width = tokens - _first(layer, tokens)
            keys, values = (
                torch.cat([_widened(one, width) for one in parts])
                for parts in zip(*((one.keys, one.values) for one in sources), strict=True)
            )
            _set(layer, keys, values, tokens)
    return made


def split(config: Any, stacked: Any, lengths: Sequence[int]) -> Iterator[Any]:
    """Yield a cache for each row of `stacked`, which it views, of as many tokens as `lengths`
    says.
    """
    for row, tokens in enumerate(lengths):
        cache = new_cache(config)
        for layer, source in zip(cache.layers, stacked.layers, strict=True):
            if source.is_initialized:
                first = source.keys.shape[-2] - (tokens - _first(layer, tokens))
                one = slice(row, row + 1), slice(None), slice(max(0, first), None)
                _set(layer, source.keys[one], source.values[one], tokens)
        yield cache


def _first(layer: Any, tokens: int) -> int:
    """Return the first of `tokens` tokens that the layer keeps."""
    return max(0, tokens - layer.sliding_window + 1) if layer.is_sliding else 0


def _set(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if layer.is_sliding:
        layer.cumulative_length = tokens


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, 0, width - part.shape[-2], 0))
