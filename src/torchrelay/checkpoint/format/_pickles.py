"""Files of ``torch.save`` and of NumPy's pickles, read without running what they ask to run."""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import re
import uuid
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from torchrelay.errors import UnsupportedError

__all__ = ["load_pickled"]

# Beside what torch.load(weights_only=True) knows: what makes values that a checkpoint can hold, and
# does nothing else.
_SAFE: list[Any] = [
    np.dtype,
    np.ndarray,
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"},
    *(
        np.array(0).__reduce__()[0],
        np.float32(0).__reduce__()[0],
    ),  # called by other names in NumPy 1
    TorchVersion,
    *(bytearray, bytes, complex, frozenset, range, set, slice),
    io.BytesIO,
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, pathlib.PosixPath, uuid.UUID),
]


def load_pickled(source: Any) -> Any:
    """Return what a file of ``torch.save`` holds, on the CPU.

    Args:
        source: its path, or a stream.

    Raises:
        UnsupportedError: it asks for something else than tensors and plain values.
        Exception: what torch raises for a damaged file.
    """
    try:
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(source, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        asks = re.search(r"GLOBAL (\S+)", str(error))
        if asks is None:
            raise
        raise UnsupportedError(
            f"it asks for {asks[1]}, which is not run; if you trust it, read it with "
            "torch.load(weights_only=False), and save() the tensors and plain values in it"
        ) from None
