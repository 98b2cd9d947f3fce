from __future__ import annotations

import inspect
import pickle
import re

import pytest

from torchrelay import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


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
    assert {name for name in defined if not name.startswith("_")} == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_cross_process_borders(cls: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(cls("what, where, how long")))
    assert type(error) is cls
    assert str(error) == "what, where, how long"


def test_ranks_are_kept() -> None:
    error = pickle.loads(pickle.dumps(errors.PeerLostError("rank 3 died", ranks=[3])))
    assert error.ranks == (3,)
    assert errors.OperationTimeoutError("late").ranks == ()
