"""Skipping draws of the Mersenne twister mt19937 without making them, as ``torchrelay/mt19937.h``
describes it. Polynomials over GF(2) are integers whose bit i is the coefficient of x^i.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

__all__ = ["twister_jump", "twister_polynomial"]

_WORDS, _MIDDLE, _BITS = 624, 397, 19937
_TWIST, _UPPER = np.uint32(0x9908B0DF), np.uint32(0x80000000)
_POLYNOMIAL_BYTES = 2496
_FOLDED = 600  # bits at a time; the two highest exponents are 623 apart
# Bit i of a byte moves to bit 2i.
_SPREAD = np.array([sum((n >> i & 1) << 2 * i for i in range(8)) for n in range(256)], "<u2")


@functools.cache
def _exponents() -> list[int]:
    """Return those of the characteristic polynomial below the leading one.

    The polynomial is that of M. Matsumoto, T. Nishimura, "Mersenne twister", ACM Transactions on
    Modeling and Computer Simulation 8(1), 1998, appendix A.
    """
    powers = [1]  # of t^623 + t^396
    for _ in range(31):
        powers.append(powers[-1] << _WORDS - 1 ^ powers[-1] << _MIDDLE - 1)
    twist, total = int(_TWIST), powers[31]
    for bit in range(31):
        total ^= powers[30 - bit] * (twist >> bit & 1)
    total = (total << _WORDS ^ total << _MIDDLE) ^ twist >> 31
    return [bit for bit in range(_BITS) if total >> bit & 1]


def _remainder(value: int) -> int:
    while (degree := value.bit_length() - 1) >= _BITS:
        first = max(_BITS, degree + 1 - _FOLDED)
        high = value >> first
        value ^= high << first
        folded = 0
        for exponent in _exponents():
            folded ^= high << exponent
        value ^= folded << first - _BITS
    return value


def twister_polynomial(distance: int) -> bytes:
    """Return x to the ``distance``, modulo the characteristic polynomial."""
    left = max(0, distance.bit_length() - 14)
    power = 1 << (distance >> left)  # below x^16384
    for digit in reversed(range(left)):
        data = np.frombuffer(power.to_bytes(_POLYNOMIAL_BYTES, "little"), np.uint8)
        power = int.from_bytes(_SPREAD[data].tobytes(), "little")  # its square
        power = _remainder(power << (distance >> digit & 1))
    return power.to_bytes(_POLYNOMIAL_BYTES, "little")


def twister_jump(state: NDArray[np.uint32], polynomial: bytes) -> None:
    """Replace the 624 words of ``state`` by those a distance on; ``polynomial`` is that of the
    distance less 1.
    """
    words = np.zeros(_BITS + _WORDS, np.uint32)
    words[:_WORDS] = state
    step = _WORDS - _MIDDLE
    for start in range(_WORDS, len(words), step):
        end = min(start + step, len(words))
        base = slice(start - _WORDS, end - _WORDS)
        second = words[base.start + 1 : base.stop + 1]
        mixed = words[base] & _UPPER | second & ~_UPPER
        middle = words[base.start + _MIDDLE : base.stop + _MIDDLE]
        words[start:end] = middle ^ mixed >> 1 ^ (second & 1) * _TWIST
    chosen = np.flatnonzero(np.unpackbits(np.frombuffer(polynomial, np.uint8), bitorder="little"))
    windows = np.lib.stride_tricks.sliding_window_view(words[1:], _WORDS)
    state[:] = np.bitwise_xor.reduce(windows[chosen], axis=0)
