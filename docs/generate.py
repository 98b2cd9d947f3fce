"""Writes docs/settings.md and docs/errors.md from the code; ``--check`` fails if they are not current."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

from torchrelay import errors
from torchrelay.config import SECTIONS, variable

DOCS = Path(__file__).parent


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting is an environment variable with a default. It is read when a process group, a communicator or a node is made.",
        "An unknown `TORCHRELAY_<ROOM>_...` variable or a bad value is an error that names it. This page is generated",
        "from the code.",
    ]
    for name in sorted(SECTIONS):
        section = SECTIONS[name]
        lines += ["", f"## {name}", "", "| variable | default | unit | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            allowed = ", ".join(f"`{value}`" for value in field.metadata["allowed"])
            meaning = field.metadata["doc"] + (f"; one of {allowed}" if allowed else "")
            default = f"`{field.default}`" if field.default != "" else "none"
            lines.append(
                f"| `{variable(section, field.name)}` | {default} | {field.metadata['unit'] or 'none'} | {meaning} |"
            )
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    tree = inspect.cleandoc(errors.__doc__ or "").split("::", 1)[1]
    tree, rest = tree.split("\n\nA message", 1)
    lines = [
        "# Errors",
        "",
        "Every error TorchRelay raises on purpose stands in one tree. A message" + rest.replace("\n", " "),
    ]
    lines += ["", "```text", inspect.cleandoc(tree).strip("\n"), "```"]
    for name in errors.__all__:
        lines += ["", f"## {name}", "", inspect.getdoc(getattr(errors, name)) or ""]
    return "\n".join(lines) + "\n"


def main() -> int:
    pages = {"settings.md": settings_page(), "errors.md": errors_page()}
    stale = [
        name
        for name, text in pages.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"not current: docs/{', docs/'.join(stale)}; run python docs/generate.py")
        return 1 if stale else 0
    for name, text in pages.items():
        (DOCS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
