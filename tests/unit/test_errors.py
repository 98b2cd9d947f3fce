from __future__ import annotations

import argparse
import builtins
import errno
import inspect
import json
import pickle
import re
import sys

import pytest

from torchrelay import errors

CLASSES = [value for name in errors.__all__ if inspect.isclass(value := getattr(errors, name))]
FUNCTIONS = {"describe", "from_json", "to_json"}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = dict(re.findall(r"── (\w+) \((\w+)\)", errors.__doc__ or ""))
    assert set(drawn) == {c.__name__ for c in CLASSES} - {"TorchRelayError"}
    for cls in CLASSES:
        if cls is not errors.TorchRelayError:
            assert drawn[cls.__name__] in {base.__name__ for base in cls.__bases__}
            assert issubclass(cls, errors.TorchRelayError)


def test_everything_defined_is_listed() -> None:
    defined = {
        n for n, o in inspect.getmembers(errors, inspect.isclass) if o.__module__ == errors.__name__
    }
    assert {name for name in defined if not name.startswith("_")} == (
        set(errors.__all__) - FUNCTIONS
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_cross_process_borders(cls: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(cls("what, where, how long")))
    assert type(error) is cls
    assert str(error) == "what, where, how long"


def test_ranks_are_kept() -> None:
    error = pickle.loads(pickle.dumps(errors.PeerLostError("rank 3 died", ranks=[3])))
    assert error.ranks == (3,)
    assert errors.OperationTimeoutError("late").ranks == ()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_survive_json(cls: type[Exception]) -> None:
    error = errors.from_json(json.loads(json.dumps(errors.to_json(cls("what, where")))))
    assert type(error) is cls
    assert str(error) == "what, where"


def test_json_keeps_errno_and_ranks() -> None:
    full = errors.from_json(errors.to_json(errors.StorageError(errno.ENOSPC, "/x: disk full")))
    assert isinstance(full, errors.StorageError)
    assert (full.errno, full.strerror) == (errno.ENOSPC, "/x: disk full")
    lost = errors.from_json(errors.to_json(errors.PeerLostError("ranks died", [3, 5])))
    assert isinstance(lost, errors.PeerLostError)
    assert lost.ranks == (3, 5)


@pytest.mark.parametrize("name", ["KeyError", "to_json", "Any", "_PeersError", "no such"])
def test_json_of_other_types_becomes_the_given_type(name: str) -> None:
    described = {"type": name, "message": "what"}
    assert type(errors.from_json(described)) is errors.PeerLostError
    error = errors.from_json(described, foreign=errors.ModelError)
    assert type(error) is errors.ModelError
    assert str(error) == f"{name}: what"


class ForeignError(Exception):
    """Its attributes are those that our errors have, of other types."""

    errno, strerror, ranks = object(), object(), 3

    def __str__(self) -> str:
        if self.args:
            return str(self.args[0])
        raise ZeroDivisionError


class Text(str):
    """Which another process could not read."""

    def __reduce__(self) -> str:
        raise TypeError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ForeignError(), "(its message cannot be read: ZeroDivisionError)"),
        (ForeignError(Text("what")), "what"),
        (ForeignError("\ud800"), r"\ud800"),
        (ForeignError("x" * 20000), "x" * 16384 + "... (20000 characters)"),
    ],
    ids=["unreadable", "subclass", "surrogate", "long"],
)
def test_errors_of_foreign_code_are_described(error: Exception, message: str) -> None:
    described = errors.to_json(error)
    assert described == {"type": "ForeignError", "message": message, "errno": None, "ranks": []}
    assert json.loads(json.dumps(described)) == pickle.loads(pickle.dumps(described))
    assert errors.describe(error) == f"ForeignError: {message}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups of errors")
def test_a_group_is_described_with_its_errors() -> None:
    make = vars(builtins)["ExceptionGroup"]
    text = errors.describe(make("two", [ValueError("a"), make("one", [ForeignError()])]))
    assert text.startswith("ExceptionGroup: two (2 sub-exceptions): ValueError: a; ExceptionGroup:")
    assert text.endswith("ForeignError: (its message cannot be read: ZeroDivisionError)")


def test_a_foreign_error_is_not_taken_for_one_of_ours_of_that_name() -> None:
    described = errors.to_json(argparse.ArgumentError(None, "what"))
    error = errors.from_json(described, foreign=errors.ModelError)
    assert type(error) is errors.ModelError
    assert str(error) == "argparse.ArgumentError: what"
