"""Random keys, as for negative sampling, drawn with few remote accesses.

The schemes of NuPS (Renz-Wieland et al., SIGMOD 2022):

``naive``
    independent draws when the sample is prepared; pulled like any keys.
``preloc``
    the same, and announced: the keys come to this node before they are used.
``pool``
    a pool is drawn and used in a shuffled order, again and again: few different keys, used often.
``local``
    a draw, then the nearest key that is at this node: never remote, but biased towards local keys.

Without replacement means: no key twice within one prepared sample.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrelay import _native, config
from torchrelay.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from torchrelay.parameters._server import Server

__all__ = ["PreparedSamples", "Sampling", "alias_table"]

SCHEMES = ("naive", "preloc", "pool", "local")
DISTRIBUTIONS = ("uniform", "log-uniform")
# A pool passes over its keys this often before it is drawn anew.
_POOL_REUSES = 16
# Draws without replacement: rejection while few are taken, a full weighted shuffle beyond this
# share.
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


def alias_table(weights: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return probabilities and aliases, for draws in constant time.

    Walker's alias method, built as by Vose (1991).
    """
    count = len(weights)
    scaled = weights * (count / weights.sum())
    probability, alias = np.ones(count), np.arange(count, dtype=np.int64)
    small = [i for i in range(count) if scaled[i] < 1]
    large = [i for i in range(count) if scaled[i] >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        probability[low], alias[low] = scaled[low], high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    return probability, alias


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
        self._alias = None if self._weights is None else alias_table(self._weights)
        # Scheme local takes a neighbour of what was drawn, which must be one that could be drawn.
        self._drawable = None if self._weights is None else (self._weights > 0).astype(np.uint8)
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._pool: IntArray | None = None
        self._pool_at = self._pool_passes = 0

    def _checked(self, weights: Any) -> FloatArray:
        values = np.asarray(
            weights.numpy() if isinstance(weights, torch.Tensor) else weights, dtype=np.float64
        )
        ok = (
            values.shape == (self.high - self.low,)
            and np.isfinite(values).all()
            and (values >= 0).all()
        )
        if not ok or values.sum() <= 0:
            raise ArgumentError(
                f"weights must be {self.high - self.low} finite numbers that are not negative, one "
                "of them positive"
            )
        return values

    def _draw(self, count: int) -> IntArray:
        """Draw independently."""
        size = self.high - self.low
        if self._alias is not None:
            probability, alias = self._alias
            column = self._random.integers(0, size, count)
            stays = self._random.random(count) < probability[column]
            return np.asarray(np.where(stays, column, alias[column]) + self.low)
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

    def _draw_distinct(self, count: int, taken: Collection[int] = ()) -> IntArray:
        """Draw keys one after another, each from those neither drawn yet nor ``taken``.

        The keys of the largest ``log(weight) + Gumbel noise``, in this order, are such draws
        (Efraimidis and Spirakis 2006); how small a weight is does not matter.
        """
        share = (count + len(taken)) / (self.high - self.low)
        if share > _REJECTION_SHARE or self._weights is not None:
            scores = self._log_weights() + self._random.gumbel(size=self.high - self.low)
            scores[np.fromiter(taken, np.int64, len(taken)) - self.low] = -np.inf
            return np.asarray(np.argsort(-scores)[:count] + self.low)
        keys: dict[int, None] = {}
        while len(keys) < count:
            drawn = self._draw(count - len(keys)).tolist()
            keys.update((key, None) for key in drawn if key not in taken)
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
            if self.scheme == "pool":
                keys = self._from_pool(count)
            else:
                keys = self._draw(count) if self.with_replacement else self._draw_distinct(count)
        return Sample(count, keys, self.scheme in ("preloc", "pool"))

    def _from_pool(self, count: int) -> IntArray:
        pieces: list[IntArray] = []
        taken: set[int] = set()
        missing = count
        renewed = False
        while missing:
            if self._pool is None or self._pool_at == len(self._pool):
                if renewed and not self.with_replacement:  # keys of small weights may be in no pool
                    pieces.append(self._draw_distinct(missing, taken))
                    break
                self._renew_pool(count)
                renewed = True
            assert self._pool is not None
            piece = self._pool[self._pool_at : self._pool_at + missing]
            self._pool_at += len(piece)
            if not self.with_replacement:
                fresh = list(dict.fromkeys(key for key in piece.tolist() if key not in taken))
                taken.update(fresh)
                piece = np.array(fresh, dtype=np.int64)
            pieces.append(piece)
            missing -= len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _renew_pool(self, at_least: int) -> None:
        """Shuffle the pool, or draw it anew once it has been used often or cannot give enough
        different keys.
        """
        size = max(config.load(config.Parameters).pool_size, at_least)
        stale = self._pool is None or self._pool_passes >= _POOL_REUSES or not self.with_replacement
        if stale:
            self._pool, self._pool_passes = self._draw(size), 0
        assert self._pool is not None
        self._random.shuffle(self._pool)
        self._pool_at = 0
        self._pool_passes += 1

    def draw(
        self, sample: Sample, count: int, store: _native.ParameterStore, keys: IntArray
    ) -> None:
        """Write the next ``count`` keys of ``sample`` to ``keys``.

        Raises:
            ArgumentError: fewer are left.
            UnavailableError: scheme ``local``, and this node has no key (left) in the range.
        """
        if sample.used + count > sample.size:
            raise ArgumentError(
                f"{count} keys of a sample that has {sample.size - sample.used} of "
                f"{sample.size} left"
            )
        if sample.keys is not None:
            keys[:] = sample.keys[sample.used : sample.used + count]
        else:
            self._draw_local(sample, count, store, keys)
        sample.used += count

    def _draw_local(
        self, sample: Sample, count: int, store: _native.ParameterStore, keys: IntArray
    ) -> None:
        with self._lock:
            keys[:] = self._draw(count)
        exclude = [] if self.with_replacement else sorted(sample.taken)
        drawable = 0 if self._drawable is None else self._drawable.ctypes.data
        found = store.nearest_local(
            keys.ctypes.data,
            count,
            self.low,
            self.high,
            exclude,
            not self.with_replacement,
            drawable,
        )
        if found < count:
            raise UnavailableError(
                f"this node has {found} keys of [{self.low}, {self.high}) to draw where {count} "
                "are needed: announce intents for some, or use another sampling scheme than local"
            )
        if not self.with_replacement:
            sample.taken.update(keys.tolist())


class PreparedSamples:
    """The prepared samples of a worker, by their ids."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ids = itertools.count()
        self._samples: dict[int, Sample] = {}

    def prepare(self, count: int) -> tuple[int, Sample]:
        """Prepare a sample; return it with its id. Raises as :meth:`Sampling.prepare`."""
        sample_id, sample = next(self._ids), self._sampling().prepare(count)
        self._samples[sample_id] = sample
        return sample_id, sample

    def draw(self, sample_id: int, count: int, keys: Any) -> None:
        """Write the next ``count`` keys of a sample to ``keys``. Raises as :meth:`Sampling.draw`;
        ArgumentError if there is no such sample.
        """
        target = keys.numpy() if isinstance(keys, torch.Tensor) else keys
        self._sampling().draw(self._sample(sample_id), count, self._server.store, target)

    def finish(self, sample_id: int) -> None:
        """Discard the rest of a sample."""
        self._sample(sample_id)
        del self._samples[sample_id]

    def _sample(self, sample_id: int) -> Sample:
        if sample_id not in self._samples:
            raise ArgumentError(
                f"there is no sample {sample_id}: it was not prepared, or is finished"
            )
        return self._samples[sample_id]

    def _sampling(self) -> Sampling:
        if self._server.sampling is None:
            raise ArgumentError(
                "sampling was not enabled: call server.enable_sampling_support first"
            )
        return self._server.sampling
