"""Values that are not tensors: stored without pickle, as they were, or refused by
their full path.
"""

from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.checkpoint import Reader, Writer, load, save
from torchrelay.checkpoint._values import MAX_VALUE_BYTES, decode, encode
from torchrelay.errors import ArgumentError, CorruptionError, MismatchError


class _Color(enum.Enum):
    RED = (1, 2)
    BLUE = "blue"


class _Size(enum.IntEnum):
    SMALL = 1


class _Holder:
    class Flags(enum.Flag):
        A = 1
        B = 2


VALUES: list[Any] = [
    None,
    True,
    7,
    -(2**70),
    2**1024 - 1,
    0.1,
    math.inf,
    -math.inf,
    "text",
    b"",
    b"\x00bytes\xff",
    [],
    {},
    (),
    [1, [2, (3,)]],
    {"a": {"$b": 1}},
    {1: "int", "1": "str", None: 0, (1, 2): "tuple"},
    ([OrderedDict([("b", 1), ("a", 2)])], {"x": (OrderedDict(),)}),
    (Counter({30: 2, 80: 1}),),
    [torch.bfloat16, {"a": torch.float8_e4m3fn}],
    (torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 3]), torch.Size([])),
    [_Color.RED, _Size.SMALL, _Holder.Flags.A | _Holder.Flags.B, {_Color.BLUE: 1}],
    [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex128(1j), np.datetime64("2026-01-02")],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    again = decode("k", json.loads(json.dumps(encode("k", value), allow_nan=False)))
    assert again == value and type(again) is type(value)
    if not isinstance(value, int):  # Python refuses to print the long ones
        assert repr(again) == repr(value)
    save({"k": (value,)}, tmp_path / "c", fsync=False)
    state: dict[str, Any] = {"k": None}
    load(state, tmp_path / "c")
    assert state["k"] == (value,)


ARRAYS = [
    np.arange(6, dtype=np.uint16).reshape(2, 3).T,
    np.array([0.1, math.nan, -0.0], dtype=">f8"),
    np.array(3.5),
    np.zeros((0, 4), dtype=bool),
    np.array(["a", "längeres"]),
    np.array([b"ab"]),
    np.array(["2026-01-02"], dtype="datetime64[D]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_keep_their_bits(array: Any, tmp_path: Path) -> None:
    save({"k": (array, [array])}, tmp_path / "c")
    state: Any = {"k": None}
    load(state, tmp_path / "c")
    for found in (state["k"][0], state["k"][1][0]):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes() and found.flags.writeable


def test_numpys_random_state(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    old = np.random.RandomState(4)
    old.random(5)
    save({"new": generator.bit_generator.state, "old": old.get_state()}, tmp_path / "c")
    fresh = np.random.default_rng(0)
    other = np.random.RandomState(0)
    state: Any = {"new": fresh.bit_generator.state, "old": other.get_state()}
    load(state, tmp_path / "c")
    fresh.bit_generator.state = state["new"]
    other.set_state(state["old"])
    assert fresh.random(4).tolist() == generator.random(4).tolist()
    assert other.random(4).tolist() == old.random(4).tolist()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_through_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state: Any = {"array": np.arange(3), "both": (np.float64(0.5), _Size.SMALL, b"x")}
    dcp.save(state, storage_writer=Writer(tmp_path / "c"))
    found: Any = {"array": None, "both": None}
    dcp.load(found, storage_reader=Reader(tmp_path / "c"))
    assert found["array"].tolist() == [0, 1, 2] and found["both"] == state["both"]


def _nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"dict": {"d": value}, "list": [value], "tuple": (value,)}[kind]
    return value


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
@pytest.mark.parametrize("depth", [400, 20_000])
def test_values_that_are_too_deep_are_refused(kind: str, depth: int, tmp_path: Path) -> None:
    for value in (_nested(depth, kind), [_nested(depth, kind), torch.ones(1)]):
        with pytest.raises(ArgumentError, match=r"^k\..*nested more than 100 levels deep"):
            save({"k": value}, tmp_path / "c")
    with pytest.raises(ArgumentError, match=r"^k\..*nested more than 100 levels deep"):
        encode("k", _nested(depth, kind))
    itself: dict[str, Any] = {}
    itself["again"] = itself
    with pytest.raises(ArgumentError, match="nested more than 100"):
        save(itself, tmp_path / "c")
    assert not list(tmp_path.iterdir())


_Pair = namedtuple("_Pair", "a b")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"b": [1, (2, {"c": {3}})]}, "a.b.1.1.c"),
        ([{"x": object()}], "a.0.x"),
        ((torch.ones(1), [object()]), "a.1.0"),
        ((defaultdict(int, {"x": 1}),), "a.0"),
        ([_Pair(1, 2)], "a.0"),
        (np.array([object()]), "a"),
        (np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]), "a"),
        (np.zeros(MAX_VALUE_BYTES + 1, dtype=np.uint8), "a"),
        ([enum.Enum("Local", "X").X], "a.0"),  # type: ignore[attr-defined]
        ([2**1024], "a.0"),
        ({"k": {1.5: torch.ones(1)}}, "a.k.1.5"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, path: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        save({"a": value}, tmp_path / "c")
    assert str(caught.value).startswith(f"{path}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad",
    [
        {"$tuple": 1},
        {"$float": "1.0"},
        {"$items": [1]},
        {"$tuple": [], "x": 1},
        {"$dtype": "load"},
        {"$dtype": 1},
        {"$bytes": 1},
        {"$bytes": "a"},
        {"$array": ["O", [1], "AAAAAAAAAAA="]},
        {"$array": ["i4,i4", [1], "AAAAAAAAAAA="]},
        {"$array": ["<i8", [2], "AAAAAAAAAAA="]},
        {"$array": ["<i8", [-1, -1], "AAAAAAAAAAA="]},
        {"$array": ["<U0", [1 << 60], ""]},
        {"$scalar": ["<f8"]},
        {"$device": "nowhere"},
        {"$size": ["a"]},
        {"$enum": ["enum", 5, "x"]},
        {"$enum": []},
        {"$unknown": 1},
        {"$ordered": {"a": 1}},
        {"$counter": [[[], 1]]},
    ],
    ids=str,
)
def test_manifests_with_other_values_are_refused(bad: Any) -> None:
    with pytest.raises(CorruptionError, match=r"^k: "):
        decode("k", bad)
    with pytest.raises(CorruptionError, match=r"^k: "):
        decode("k", [{"a": bad}])


def test_a_manifest_nested_too_deep_is_refused() -> None:
    for kind in ("list", "dict"):
        with pytest.raises(CorruptionError, match=r"k: .*nested too deep"):
            decode("k", _nested(100_000, kind))


def test_enums_are_found_but_never_imported(tmp_path: Path) -> None:
    (tmp_path / "colors.py").write_text(
        "import enum\nprint('imported')\nclass Color(enum.Enum):\n    RED = 1\n"
    )
    code = """
import sys
from torchrelay.checkpoint import load, save
state = {"color": None}
if sys.argv[1] == "save":
    import colors
    save({"color": colors.Color.RED}, "c")
else:
    try:
        load(state, "c")
    except Exception as error:
        print(type(error).__name__, error)
"""
    out = [
        subprocess.run(
            [sys.executable, "-c", code, way],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for way in ("save", "load")
    ]
    assert out[0] == "imported\n"
    assert out[1].startswith("MismatchError color: the value is a colors.Color")
    for member in ("GREEN", 7):
        with pytest.raises(MismatchError, match="has no member"):
            decode("k", {"$enum": [__name__, "_Color", member]})
    for name in ("enum.EnumMeta", "VALUES", "_Pair", "nothing"):
        with pytest.raises(MismatchError, match="not imported here"):
            decode("k", {"$enum": [__name__, name, "x"]})
