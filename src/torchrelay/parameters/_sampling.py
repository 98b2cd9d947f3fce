"""Random keys, as for negative sampling, drawn with few remote accesses.

The schemes of NuPS (Renz-Wieland et al., SIGMOD 2022):

``naive``
    independent draws when the sample is prepared; pulled like any keys.
``preloc``
    the same, and announced: the keys come to this node before they are used.
``pool``
    a pool is drawn and used in a shuffled order, again and again: few different keys, used often;
    without replacement, as ``preloc``.
``local``
    a draw, then the nearest key that is at this node: never remote, but biased towards local keys.

Without replacement means: no key twice within one prepared sample.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrelay import _native, config
from torchrelay.errors import ArgumentError, UnavailableError

__all__ = ["Sample", "Sampling"]

SCHEMES = ("naive", "preloc", "pool", "local")
DISTRIBUTIONS = ("uniform", "log-uniform")
# A pool passes over its keys this often before it is drawn anew.
_POOL_PASSES = 16
# Draws without replacement: rejection up to this share of the keys, else a full shuffle.
_REJECTION_SHARE = 0.25

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Sample:
    """A prepared sample.

    Args:
        keys: drawn already, except by the scheme ``local``.
        announced: whether the keys should be announced.
        used: the number of keys that were given out.
        taken: those keys, for ``local`` without replacement.
    """

    size: int
    keys: IntArray | None
    announced: bool = False
    used: int = 0
    taken: set[int] = field(default_factory=set)


class Sampling:
    """How a node draws keys; may be used by several workers."""

    def __init__(
        self,
        scheme: str,
        with_replacement: bool,
        distribution: str,
        low: int,
        high: int,
        weights: Any = None,
        seed: int | None = None,
    ) -> None:
        if scheme not in SCHEMES:
            raise ArgumentError(f"sampling scheme {scheme!r}: the choices are {', '.join(SCHEMES)}")
        if distribution not in DISTRIBUTIONS:
            raise ArgumentError(
                f"distribution {distribution!r}: the choices are {', '.join(DISTRIBUTIONS)}"
            )
        self.scheme, self.with_replacement = scheme, with_replacement
        self.distribution = distribution
        self.low, self.high = low, high
        self._weights = None if weights is None else self._checked(weights)
        # Of drawing a key up to this one; the last is 1, which no random number reaches.
        self._cumulative = None
        if self._weights is not None:
            self._cumulative = (self._weights / self._weights.sum()).cumsum()
            self._cumulative /= self._cumulative[-1]
        # Scheme local takes a neighbour of what was drawn, which must be one that could be drawn.
        self._drawable = None if self._weights is None else (self._weights > 0).astype(np.uint8)
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._pool = np.empty(0, dtype=np.int64)
        self._pool_at, self._pool_passes = 0, _POOL_PASSES

    def _checked(self, weights: Any) -> FloatArray:
        values = np.asarray(weights, dtype=np.float64)
        ok = values.shape == (self.high - self.low,) and (np.isfinite(values) & (values >= 0)).all()
        if not ok or values.sum() <= 0:
            raise ArgumentError(
                f"weights must be {self.high - self.low} finite numbers that are not negative, one "
                "of them positive"
            )
        return values

    def _draw(self, count: int) -> IntArray:
        """Draw independently."""
        size = self.high - self.low
        if self._cumulative is not None:
            drawn = self._cumulative.searchsorted(self._random.random(count), side="right")
            return np.asarray(drawn + self.low)
        if self.distribution == "uniform":
            return self._random.integers(self.low, self.high, count)
        # P(k) = log((k + 2) / (k + 1)) / log(size + 1), k from 0; inverted
        drawn = np.exp(self._random.random(count) * np.log(size + 1.0)) - 1.0
        return np.asarray(np.minimum(drawn.astype(np.int64), size - 1) + self.low)

    def _log_weights(self) -> FloatArray:
        """Return the logarithm of each key's weight, up to a constant."""
        size = self.high - self.low
        if self._weights is not None:
            with np.errstate(divide="ignore"):  # weight 0: -inf, drawn last
                return np.asarray(np.log(self._weights))
        if self.distribution == "uniform":
            return np.zeros(size)
        return np.asarray(np.log(np.log1p(1.0 / np.arange(1.0, size + 1.0))))

    def _draw_distinct(self, count: int) -> IntArray:
        """Draw keys one after another, each from those not drawn yet.

        The keys of the largest ``log(weight) + Gumbel noise``, in this order, are such draws
        (Efraimidis and Spirakis 2006); how small a weight is does not matter.
        """
        size = self.high - self.low
        if count > _REJECTION_SHARE * size or self._weights is not None:
            scores = self._log_weights() + self._random.gumbel(size=size)
            return np.asarray(np.argsort(-scores)[:count] + self.low)
        keys: dict[int, None] = {}
        while len(keys) < count:
            keys |= dict.fromkeys(self._draw(count - len(keys)).tolist())
        return np.fromiter(keys, dtype=np.int64, count=count)

    def prepare(self, count: int) -> Sample:
        """Prepare a sample of ``count`` keys.

        Raises:
            ArgumentError: ``count`` is negative, or more than there are keys to draw without
                replacement.
        """
        available = (
            self.high - self.low if self._weights is None else int((self._weights > 0).sum())
        )
        if count < 0 or (not self.with_replacement and count > available):
            how = "" if self.with_replacement else " without replacement"
            raise ArgumentError(
                f"a sample of {count} keys{how}: there are {available} keys to draw"
            )
        if self.scheme == "local":
            return Sample(count, None)
        with self._lock:
            if not self.with_replacement:
                keys = self._draw_distinct(count)
            elif self.scheme == "pool":
                keys = self._from_pool(count)
            else:
                keys = self._draw(count)
        return Sample(count, keys, self.scheme in ("preloc", "pool"))

    def _from_pool(self, count: int) -> IntArray:
        """Take the next keys of the pool; shuffle it at its end, or draw it anew."""
        pieces = [self._pool[:0]]
        while count:
            if self._pool_at == len(self._pool):
                if self._pool_passes == _POOL_PASSES:
                    self._pool = self._draw(config.load(config.Parameters).pool_size)
                    self._pool_passes = 0
                self._pool = self._random.permutation(self._pool)  # `pieces` are views of it
                self._pool_at, self._pool_passes = 0, self._pool_passes + 1
            pieces.append(self._pool[self._pool_at : self._pool_at + count])
            self._pool_at += len(pieces[-1])
            count -= len(pieces[-1])
        return np.concatenate(pieces)

    def draw(self, sample: Sample, store: _native.ParameterStore, keys: IntArray) -> None:
        """Write the next ``len(keys)`` keys of ``sample`` to ``keys``.

        Raises:
            ArgumentError: fewer are left.
            UnavailableError: scheme ``local``, and this node has no key (left) in the range.
        """
        end = sample.used + len(keys)
        if end > sample.size:
            raise ArgumentError(
                f"{len(keys)} keys of a sample that has {sample.size - sample.used} of "
                f"{sample.size} left"
            )
        if sample.keys is None:
            self._draw_local(sample, store, keys)
        else:
            keys[:] = sample.keys[sample.used : end]
        sample.used = end

    def _draw_local(self, sample: Sample, store: _native.ParameterStore, keys: IntArray) -> None:
        with self._lock:
            keys[:] = self._draw(len(keys))
        distinct = not self.with_replacement
        drawable = 0 if self._drawable is None else self._drawable.ctypes.data
        found = store.nearest_local(
            keys.ctypes.data,
            len(keys),
            self.low,
            self.high,
            sorted(sample.taken),
            distinct,
            drawable,
        )
        if found < len(keys):
            raise UnavailableError(
                f"this node has {found} keys of [{self.low}, {self.high}) to draw where "
                f"{len(keys)} are needed: announce intents for some, or use another sampling "
                "scheme than local"
            )
        if distinct:
            sample.taken.update(keys.tolist())
