"""docs/troubleshooting.md quotes messages that the code has."""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "troubleshooting.md"
_GAP = "…"  # what stands for names and numbers, on the page and in an f-string


def _messages(path: Path) -> Iterator[str]:
    """Yield the strings of a source file, with a gap for each value that an f-string inserts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _GAP for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _quoted() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", _PAGE.read_text(), flags=re.MULTILINE)


def test_the_page_quotes_messages() -> None:
    assert len(_quoted()) > 30


@pytest.fixture(scope="module")
def messages() -> str:
    python = (_ROOT / "src" / "torchrelay").rglob("*.py")
    native = (path for path in (_ROOT / "native").rglob("*") if path.suffix in (".cc", ".h"))
    return "\n".join(
        [
            *(message for path in python for message in _messages(path)),
            *(re.sub(r'"\s+"', "", path.read_text()) for path in native),
        ]
    )


# Parts of the quoted messages that are torch's own.
_OF_TORCH = (
    "wait timeout after",
    "failed to listen on any local network address",
    "The client socket has timed out after",
    "clients joined",
)


def _of_torch(quote: str) -> bool:
    return any(part in quote for part in _OF_TORCH)


@pytest.mark.parametrize("quote", [quote for quote in _quoted() if not _of_torch(quote)])
def test_a_quoted_message_is_in_the_code(quote: str, messages: str) -> None:
    assert quote in messages


@pytest.mark.parametrize("part", _OF_TORCH)
def test_a_message_of_torch_is_in_torch(part: str) -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        assert text.find(part.encode()) >= 0
    assert any(part in quote for quote in _quoted())
