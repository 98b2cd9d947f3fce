"""A file of a profile is a cache: whatever is wrong with it costs a profile, and no more."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from torchrelay.switching.worker._profile import Layer, Output, Profile, load_profile, save_profile

PROFILE = Profile((Layer((1, 0), 0.5), Layer((2,), 0.25)), 0.7, (Output("output", "float32", 2),))
_WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e300,
    1e999,
    float("nan"),
    "a",
    [],
    {},
    [[]],
    1 << 70,
    "9" * 5000,
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "profile.json"
    save_profile(file, PROFILE)
    assert load_profile(file, 3) == PROFILE and load_profile(file, 4) is None
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_damaged_files_are_no_profiles(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    good = json.dumps(PROFILE._asdict())
    draw = random.Random(3)
    for _ in range(2000):
        kept = json.loads(good)
        at = kept
        while isinstance(at, dict | list) and at and draw.random() < 0.8:
            key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or draw.random() < 0.3:
                at[key] = draw.choice(_WRONG)
                break
            at = at[key]
        text = json.dumps(kept)
        file.write_text(text[: draw.randint(0, len(text))] if draw.random() < 0.3 else text)
        found = load_profile(file, 3)
        assert found is None or all(0 <= layer.compute_s <= 1e6 for layer in found.layers)
    for content in (b"", b"[" * 100_000, os.urandom(300), b"null"):
        file.write_bytes(content)
        assert load_profile(file, 3) is None


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing", "\0", "below a file", "link"])
def test_what_is_no_file_is_no_profile(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "profile.json"
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "\0":
        file = tmp_path / "a\0b"
    elif kind == "below a file":
        (tmp_path / "file").touch()
        file = tmp_path / "file" / "profile.json"
    elif kind == "link":
        file.symlink_to(file)
    assert load_profile(file, 3) is None
    if kind != "pipe":
        save_profile(file, PROFILE)
    assert not list(tmp_path.glob("*.tmp"))
