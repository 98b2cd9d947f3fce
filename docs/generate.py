"""Generate docs/settings.md, docs/errors.md and docs/api.md; ``--check`` fails if one is stale."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path

from torchrelay import errors
from torchrelay.config import SECTIONS, unit_of, variable

DOCS = Path(__file__).parent


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every setting is an environment variable with a default. `mpi` reads its settings when it "
        "is",
        "imported; the others read theirs when a process group, table, network, cache or "
        "asynchronous",
        "save is created. An unknown variable that begins with `TORCHRELAY_`, or an invalid value, "
        "raises",
        "a `ConfigError` that names it.",
    ]
    for name in sorted(SECTIONS):
        section = SECTIONS[name]
        lines += [
            "",
            f"## {name}",
            "",
            "| variable | default | unit | meaning |",
            "|---|---|---|---|",
        ]
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            allowed = ", ".join(f"`{value}`" for value in field.metadata["allowed"])
            meaning = field.metadata["doc"] + (f"; one of {allowed}" if allowed else "")
            default = f"`{field.default}`" if field.default != "" else "none"
            lines.append(
                f"| `{variable(section, field.name)}` | {default} | {unit_of(field) or 'none'} | "
                f"{meaning} |"
            )
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    tree = inspect.cleandoc(errors.__doc__ or "").split("::", 1)[1]
    tree, rest = tree.split("\n\nA message", 1)
    lines = [
        "# Errors",
        "",
        "All errors that TorchRelay raises deliberately derive from `TorchRelayError`.",
        "A message" + rest.replace("\n", " "),
    ]
    lines += ["", "```text", inspect.cleandoc(tree).strip("\n"), "```"]
    for name in errors.__all__:
        lines += ["", f"## {name}", "", inspect.getdoc(getattr(errors, name)) or ""]
    return "\n".join(lines) + "\n"


FOUNDATION = ("metrics", "world", "transport", "buffers", "config")
COMPONENTS = {
    "aggregation": "aggregation.md",
    "aggregation.switch": "switch.md",
    "deferred": "deferred.md",
    "checkpoint": "checkpoint.md",
    "training": "training.md",
    "mpi": "mpi.md",
    "parameters": "parameters.md",
    "switching": "switching.md",
}


def api_page() -> str:
    """Return the index of all public names, with the API of modules that have no page of their
    own.
    """
    lines = ["# API", "", "| module | public names |", "|---|---|"]
    for name, page in COMPONENTS.items():
        module = importlib.import_module(f"torchrelay.{name}")
        names = ", ".join(f"`{public}`" for public in module.__all__)
        lines.append(f"| [`torchrelay.{name}`]({page}) | {names} |")
    aggregation = importlib.import_module("torchrelay.aggregation")
    lines += ["", "::: torchrelay.aggregation", "    options:", "      members:"]
    lines += [f"        - {public}" for public in aggregation.__all__]
    for name in FOUNDATION:
        lines += ["", f"::: torchrelay.{name}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    pages = {"settings.md": settings_page(), "errors.md": errors_page(), "api.md": api_page()}
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
