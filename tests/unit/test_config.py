from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from torchrelay.config import SECTIONS, Section, load, setting, variable
from torchrelay.errors import ConfigError


@pytest.fixture
def sample() -> Iterator[type[Any]]:
    class Sample(Section, name="sample"):
        timeout_s: float = setting(30.0, "How long to wait.", minimum=0.1)
        plane: str = setting("shm", "Which way bytes go.", allowed=("shm", "udp"))
        debug: bool = setting(False, "Check every call.")
        slots: int = setting(8, "How many.", minimum=1)

    yield Sample
    del SECTIONS["sample"]


def test_defaults_without_an_environment(sample: type[Any]) -> None:
    assert load(sample, {}) == sample(30.0, "shm", False, 8)


def test_the_environment_wins(sample: type[Any]) -> None:
    environ = {
        "TORCHRELAY_SAMPLE_TIMEOUT_S": "1.5",
        "TORCHRELAY_SAMPLE_PLANE": "udp",
        "TORCHRELAY_SAMPLE_DEBUG": "Yes",
        "TORCHRELAY_SAMPLE_SLOTS": "2",
        "UNRELATED": "x",
    }
    assert load(sample, environ) == sample(1.5, "udp", True, 2)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("TORCHRELAY_SAMPLE_TIMEOUT_S", "soon", "of type float"),
        ("TORCHRELAY_SAMPLE_TIMEOUT_S", "0", "at least 0.1 s"),
        ("TORCHRELAY_SAMPLE_TIMEOUT_S", "nan", "at least 0.1 s"),
        ("TORCHRELAY_SAMPLE_PLANE", "tcp", "one of shm, udp"),
        ("TORCHRELAY_SAMPLE_DEBUG", "maybe", "one of 1, true"),
        ("TORCHRELAY_SAMPLE_SLOTS", "1.5", "of type int"),
        ("TORCHRELAY_SAMPEL_SLOTS", "1", "begin with TORCHRELAY_AGGREGATION_, "),
        ("TORCHRELAY_SAMPLE_TIMEOUT", "1", "no such setting; sample has TORCHRELAY_SAMPLE_DEBUG"),
    ],
)
def test_bad_values_name_the_variable(
    sample: type[Any], key: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(sample, {key: value})
    assert key in str(caught.value)


@pytest.mark.parametrize("service", ["TORCHRELAY", "TORCHRELAY_WEB", "TORCHRELAY_SAMPLE"])
def test_variables_of_a_kubernetes_service_are_no_settings(sample: type[Any], service: str) -> None:
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.0.0.7:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    assert load(sample, environ) == sample()
    with pytest.raises(ConfigError, match=f"{service}_PORT: no such setting"):
        load(sample, {f"{service}_PORT": "8000"})


def test_settings_cannot_be_changed(sample: type[Any]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(sample, {}).slots = 3


def test_every_setting_is_documented_and_its_default_is_allowed() -> None:
    for cls in SECTIONS.values():
        load(cls, {})
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            doc = field.metadata["doc"]  # a phrase: it goes into a table
            assert doc, variable(cls, field.name)
            assert not doc.endswith("."), variable(cls, field.name)
            assert not field.metadata["allowed"] or field.default in field.metadata["allowed"]
            load(cls, {variable(cls, field.name): str(field.default)})
