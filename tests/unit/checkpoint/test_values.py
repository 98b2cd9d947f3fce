"""Values that are not tensors: stored without pickle, as they were, or refused by
their full path.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import os
import random
import subprocess
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import preloaded
from torchrelay.checkpoint import Reader, Writer, async_save, load, save
from torchrelay.checkpoint._tools import read_state
from torchrelay.checkpoint.format._values import MAX_VALUE_BYTES, decode, encode
from torchrelay.cli import app
from torchrelay.errors import ArgumentError, CorruptionError, MismatchError, UnsupportedError


class _Color(enum.Enum):
    RED = (1, 2)
    BLUE = "blue"


class _Size(enum.IntEnum):
    SMALL = 1


class _Holder:
    class Flags(enum.Flag):
        A = 1
        B = 2


class _Point(NamedTuple):
    x: int
    y: Any = None


def _stream(content: bytes, position: int) -> io.BytesIO:
    stream = io.BytesIO(content)
    stream.seek(position)
    return stream


VALUES: list[Any] = [
    None,
    True,
    7,
    -(2**70),
    2**1024 - 1,
    0.1,
    math.inf,
    -math.inf,
    -0.0,
    "text",
    "\udcff $",
    b"",
    b"\x00bytes\xff",
    [],
    {},
    (),
    [1, [2, (3,)]],
    {"a": {"$b": 1}},
    {1: "int", "1": "str", None: 0, (1, 2): "tuple", np.int64(3): 0, 2.5: 1},
    {True: "bool", 0: "int"},
    ([OrderedDict([("b", 1), ("a", 2)])], {"x": (OrderedDict(),)}),
    (Counter({30: 2, 80: 1}),),
    [torch.bfloat16, {"a": torch.float8_e4m3fn}],
    (torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 3]), torch.Size([])),
    [_Color.RED, _Size.SMALL, _Holder.Flags.A | _Holder.Flags.B, {_Color.BLUE: 1}],
    [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex128(1j), np.datetime64("2026-01-02")],
    [np.str_("a"), np.bytes_(b"a"), np.dtype("f4"), np.dtype(">i2"), np.dtype("M8[s]")],
    [complex(1, -0.0), complex(math.inf, 2)],
    [set(), {1, "a", (2, 3)}, {frozenset({1})}],
    [frozenset(), frozenset({b"x", None, 1.5})],
    [deque([1, (2,)], 3), deque()],
    [defaultdict(int, {"x": 1}), defaultdict(None), (defaultdict(list, {1: [2]}),)],
    [range(3), range(5, -5, -2), slice(1), slice(None, "a", (2,))],
    bytearray(b"\x00x"),
    [_Point(1, (2, {3})), {"deep": (_Point(1),)}],
    [torch.__version__, torch.strided, torch.sparse_coo],
    [Path("/a/b c"), Path()],
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    [datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.timedelta(-1, 5, 7)],
    [decimal.Decimal("1.50"), fractions.Fraction(-2, 3), uuid.UUID(int=5)],
]


def _same(one: Any, other: Any) -> bool:  # noqa: PLR0911 - one for each kind
    """Return whether two values are equal in all their parts, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and one.tobytes() == other.tobytes()
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell()) == (other.getvalue(), other.tell())
    if isinstance(one, Mapping):
        same = getattr(one, "default_factory", 0) is getattr(other, "default_factory", 0)
        return same and _same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple | deque):
        limits = getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
        return limits and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, set | frozenset):
        return one == other and sorted(map(_kind, one)) == sorted(map(_kind, other))
    return repr(one) == repr(other) if not isinstance(one, int) else bool(one == other)


def _kind(value: Any) -> str:
    return f"{type(value)} {value!r}"


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    again = decode("k", json.loads(json.dumps(encode("k", value), allow_nan=False)))
    assert _same(again, value) and again == value
    save({"k": (value,)}, tmp_path / "c", fsync=False)
    state: dict[str, Any] = {"k": None}
    load(state, tmp_path / "c")
    assert _same(state["k"], (value,))


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


def _state() -> dict[str, Any]:
    """A state with every value, also those that have no equality, and containers without any."""
    values = {f"v{number}": (value,) for number, value in enumerate(VALUES)}
    arrays = {f"a{number}": (value, [value]) for number, value in enumerate(ARRAYS)}
    return {
        "values": values,
        "arrays": arrays,
        "streams": [_stream(b"", 0), _stream(b"abc", 2)],
        "nan": (math.nan, np.float32(math.nan)),
        "random": random.Random(1).getstate(),
        "empty": {"a": {}, "b": [{}], "c": [{}, {"d": {}}], "e": [], "f": ()},
        "keys": {7: torch.ones(1), True: 2, 2.5: 3, None: 4, (1, 2): 5, False: torch.ones(2)},
    }


def _leave_to_dcp(state: dict[str, Any]) -> None:
    """Remove what DCP changes: it makes strings of keys, and NumPy's pickle swaps the bytes."""
    del state["keys"]
    state["arrays"] = {k: v for k, v in state["arrays"].items() if v[0].dtype.byteorder != ">"}


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the same structure, without values."""

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return _blank(value)
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return [*map(blank, value)]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    return {key: blank(value) for key, value in state.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["save", "async_save", "Writer"])
@pytest.mark.parametrize("back", ["load", "Reader"])
def test_every_value_by_every_way(way: str, back: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state, path = _state(), tmp_path / "c"
    if back == "Reader":
        _leave_to_dcp(state)
    if way == "Writer":
        dcp.save(state, storage_writer=Writer(path, fsync=False))
    elif way == "save":
        save(state, path, fsync=False)
    else:
        async_save(state, path, fsync=False).result()
    found = _blank(state)
    if back == "load":
        load(found, path)
    else:
        dcp.load(found, storage_reader=Reader(path))
    assert _same(found, state)


def _convert(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_every_value_converted_and_back(tmp_path: Path) -> None:
    state = _state()
    save(state, tmp_path / "c", fsync=False)
    assert _same(_sorted(read_state(str(tmp_path / "c"))), _sorted(state))
    _convert(tmp_path / "c", tmp_path / "again")
    assert _same(_sorted(read_state(str(tmp_path / "again"))), _sorted(state))
    assert "values that torch.load refuses" in _convert(
        tmp_path / "c", tmp_path / "t", "--to", "torch"
    )
    for mmap in (False, True):
        found = torch.load(tmp_path / "t", weights_only=True, mmap=mmap)
        assert found["empty"] == state["empty"]
        number, by = random.Random(1).getstate(), np.asarray(found["arrays"]["a0"][0])
        assert found["random"] == number and by.tolist() == ARRAYS[0].tolist()
    _convert(tmp_path / "t", tmp_path / "back")
    assert _same(_sorted(read_state(str(tmp_path / "back"))), _sorted(state))


def _sorted(value: Any) -> Any:
    """Return a state with the keys of its dictionaries in one order."""
    if type(value) is dict:
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [*map(_sorted, value)]
    return value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_every_value_that_was_converted_to_its_format(tmp_path: Path) -> None:
    """DCP unpickles what it reads; we do not, and name what only a pickle holds."""
    import torch.distributed.checkpoint as dcp

    state = _state()
    _leave_to_dcp(state)
    save(state, tmp_path / "c", fsync=False)
    said = _convert(tmp_path / "c", tmp_path / "dcp", "--to", "dcp")
    assert "left out 4 empty dictionaries, which DCP cannot hold: empty.a, empty.b.0, " in said
    found = _blank(state)
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert _same(found, state)
    for name, value in {**state["values"], **state["arrays"]}.items():
        group = "values" if name.startswith("v") else "arrays"
        found = {group: {name: None}}
        if any(kind in repr(value) for kind in ("_Color", "deque", "defaultdict", "_Point")):
            with pytest.raises(UnsupportedError, match=rf"{group}\.{name}: DCP stored it as a pi"):
                load(found, tmp_path / "dcp")
        else:
            load(found, tmp_path / "dcp")
            assert _same(found[group][name], value), value
    load({"streams": None}, tmp_path / "dcp")


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(codec="utf-8") | st.sampled_from("$.\udcff"), max_size=4),
    st.binary(max_size=4),
    st.datetimes(timezones=st.just(datetime.timezone.utc) | st.none()).map(
        lambda at: at.replace(fold=0)
    ),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.sampled_from([*_Color, np.float16(1), np.int8(3), torch.bool, torch.Size([3]), range(4)]),
)
_KEYS = _SCALARS.filter(lambda key: key == key)  # noqa: PLR0124 - not NaN
_ITEMS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
        st.sets(_KEYS, max_size=3),
        st.frozensets(_KEYS, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(_KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.tuples(st.integers(), inner).map(lambda items: _Point(*items)),
        st.binary(max_size=4).map(lambda content: _stream(content, len(content) // 2)),
        st.binary(max_size=4).map(bytearray),
    ),
    max_leaves=12,
)


@settings(max_examples=int(os.environ.get("CHECKPOINT_VALUES_EXAMPLES", "100")))
@given(_ITEMS)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(encode("k", value), allow_nan=False)
    assert _same(decode("k", json.loads(text)), value)


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


class _Text(str):
    pass


@dataclasses.dataclass
class _Data:
    x: int


class _Tagged(namedtuple("_Tagged", "a")):  # with attributes beside its fields
    pass


_Local = namedtuple("Other", "a")  # type: ignore[name-match]  # found under no such name
_tagged = _Tagged(1)
_tagged.note = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "path", "remedy"),
    [
        ([{"x": object()}], "a.0.x", "what it is made of"),
        ((torch.ones(1), [object()]), "a.1.0", "what it is made of"),
        ({"b": [1, (2, {"c": {_Text("x")}})]}, "a.b.1.1.c: an item", r"str\(value\)"),
        ((defaultdict(lambda: 1, {"x": 1}),), "a.0", r"dict\(value\)"),
        ([_Local(1)], "a.0", "define the class at the top of a module"),
        ([_tagged], "a.0", r"tuple\(value\) and vars\(value\)"),
        (np.array([object()]), "a", r"tolist\(\)"),
        (np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]), "a", r"its fields"),
        (np.ma.array([1], mask=[True]), "a", "its data and its mask"),
        (np.zeros(MAX_VALUE_BYTES + 1, dtype=np.uint8), "a", "torch.from_numpy"),
        ([bytes(MAX_VALUE_BYTES + 1)], "a.0", r"torch.frombuffer\(bytearray\(value\)"),
        ([enum.Enum("Local", "X").X], "a.0", "top of a module"),  # type: ignore[attr-defined]
        ([2**1024], "a.0", r"hex\(\)"),
        ([_Text("x")], "a.0", r"str\(value\)"),
        ([_Data(1)], "a.0", "dataclasses.asdict"),
        ([types.SimpleNamespace(a=1)], "a.0", r"vars\(value\)"),
        ((types.MappingProxyType({"a": 1}),), "a.0", r"dict\(value\)"),
        (({torch.ones(1)},), "a.0: an item", "a list of tensors"),
        ([torch.Generator()], "a.0", "get_state"),
        ([random.Random()], "a.0", "getstate"),
        ([np.random.default_rng()], "a.0", "bit_generator.state"),
        ([torch.channels_last], "a.0", r"str\(value\)"),
        ([io.StringIO("x")], "a.0", "its content"),
        ([memoryview(b"x")], "a.0", r"bytes\(value\)"),
        ([int], "a.0", "its name"),
        ([print], "a.0", "what it is made of"),
        ([datetime.datetime(2026, 1, 2, fold=1)], "a.0", "isoformat"),
        ([zoneinfo.ZoneInfo("UTC")], "a.0", "its name"),
        ({"k": {object(): torch.ones(1)}}, None, "what it is made of"),
    ],
)
def test_what_cannot_be_stored_is_named(
    value: Any, path: str | None, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=remedy) as caught:
        save({"a": value}, tmp_path / "c")
    assert path is None or str(caught.value).startswith(f"{path}: ")
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
        {"$set": [[]]},
        {"$range": [0, 1, 0]},
        {"$stream": ["", -1]},
        {"$deque": ["a", []]},
        {"$default": ["eval", []]},
        {"$version": 1},
        {"$fraction": [1, 0]},
        {"$named": [__name__, "_Point", 1]},
        {"$date": "2026-13-01"},
        {"$layout": "float32"},
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


def test_kinds_of_values_of_newer_versions_are_refused_where_they_are_wanted() -> None:
    values: list[Any] = [{"$newer": 1}, [{"a": {"$newer": {}}}]]
    for value in values:
        with pytest.raises(UnsupportedError, match=r"^k: .*does not know, '\$newer'"):
            decode("k", value)


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
            [preloaded.python(), "-c", code, way],
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
    for name in ("enum.EnumMeta", "VALUES", "_Point", "nothing"):
        with pytest.raises(MismatchError, match="not imported here"):
            decode("k", {"$enum": [__name__, name, "x"]})
