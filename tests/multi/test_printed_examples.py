"""Every example that the README prints, and every one of the docs that is a whole program, runs as
printed. A part of a program uses names that it does not define.
"""

from __future__ import annotations

import ast
import builtins
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import preloaded

# A process that imports torch starts slowly where many others run.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n+(?:Save it as `(.+?)` and run\s`(.+?)`)?", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Example:
    name: str
    code: str
    file: str
    command: str


def _examples() -> list[Example]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, (code, file, command) in enumerate(BLOCK.findall(page.read_text())):
            is_whole = not _undefined(code) and "my_models" not in code
            if page.name == "README.md" or command or is_whole:
                name = f"{page.stem}-{number}"
                found.append(
                    Example(name, code, file or "example.py", command or "python example.py")
                )
    return found


def _undefined(code: str) -> set[str]:
    """Return the names that ``code`` uses and does not define before."""
    tree = ast.parse(code)
    defined: set[str] = set(vars(builtins))
    assigned: dict[str, int] = {}  # the first line
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.comprehension):
            names = (one for one in ast.walk(node.target) if isinstance(one, ast.Name))
            defined.update(one.id for one in names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            assigned[node.id] = min(node.lineno, assigned.get(node.id, node.lineno))
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and node.id not in defined
        and isinstance(node.ctx, ast.Load)
        and assigned.get(node.id, node.lineno) >= node.lineno
    }


def _environment() -> dict[str, str]:
    environ = preloaded.environment(OMP_NUM_THREADS="1", PYTHONWARNINGS="default")
    # Open MPI refuses root, and more ranks than cores, unless told.
    environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return environ


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.name)
def test_printed_example(example: Example, tmp_path: Path) -> None:
    if "mpi" in example.code:
        pytest.importorskip("mpi4py")
    (tmp_path / example.file).write_text(example.code)
    command = shlex.split(example.command)
    if command[0] == "torchrun":
        command.insert(1, "--standalone")  # a free port: other runs may share the machine
    environ = _environment()
    executable = shutil.which(command[0], path=environ["PATH"])
    result = subprocess.run(
        command,
        executable=executable,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
