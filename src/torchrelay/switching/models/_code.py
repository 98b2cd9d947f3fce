"""The Python files of a factory, as they were when its model was added.

Every process that builds the model runs these, whatever has become of the files: the factory's file
and what it imports from the same folder of modules, directly or not. Installed packages are not
captured.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

__all__ = ["Code", "Source", "capture", "digest_of", "file_of", "run", "use"]


class Source(NamedTuple):
    """A module's name, its file, and the text of that."""

    name: str
    file: str
    text: bytes


Code = tuple[Source, ...]  # the factory's file first
_parsing = threading.Lock()  # Python 3.11's parser fails if threads use it at the same time
_NEVER = {"torchrelay", *sys.stdlib_module_names}  # a file of such a name is not what is imported


def file_of(module: str) -> str | None:
    """Return the file of `module` without importing anything; None if it is installed, built in or
    not found.
    """
    parts = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(parts[0])
    if spec is None or parts[0] in _NEVER:
        return None
    installed = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    for place in spec.submodule_search_locations or [spec.origin or ""]:
        folder = Path(place).resolve().parent
        if not any(folder.is_relative_to(one) for one in installed):
            return _file_in(folder, parts)
    return None


def capture(file: str, module: str = "") -> Code:
    """Return the code of a factory in `file`, which is imported as `module` if that has a name.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256(file.encode()).hexdigest()[:16]
    found = [Source(module or f"torchrelay_models_{digest}", file, Path(file).read_bytes())]
    is_package = bool(module) and Path(file).name == "__init__.py"
    folder = Path(file).parents[module.count(".") + is_package]
    names = {found[0].name}
    for source in found:  # grows
        for name in (*_with_packages(source.name), *_imported(source)):
            if name in names or name.partition(".")[0] in _NEVER:
                continue
            if path := _file_in(folder, name.split(".")):
                names.add(name)
                found.append(Source(name, path, Path(path).read_bytes()))
    return tuple(found)


def _file_in(folder: Path, parts: list[str]) -> str | None:
    """Return the file of a package or module below `folder`, if there is one."""
    path = folder.joinpath(*parts)
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((str(one) for one in files if one.is_file()), None)


def _with_packages(name: str) -> Iterator[str]:
    """Yield the packages of a module from the outermost, then its name."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def digest_of(code: Code) -> str:
    """Return a digest of the names and texts; "" without code."""
    return hashlib.sha256(repr(code).encode()).hexdigest()[:16] if code else ""


def run(code: Code) -> ModuleType:
    """Return the factory's module, executed once in this process."""
    use(code)
    return importlib.import_module(code[0].name)


def use(code: Code) -> None:
    """Let the names of `code` be those of its modules, for imports within functions too.

    Modules of other codes that have the same names, such as an older version, lose theirs until
    their code is used again.
    """
    if code is _texts.used:
        return
    _texts.used = code
    if _texts not in sys.meta_path:
        sys.meta_path.insert(0, _texts)
    others = [_owners[one.name] for one in code if _texts.sources.get(one.name, one) != one]
    for other in dict.fromkeys(others):
        for one in other:
            if _owners.get(one.name) == other:
                del _owners[one.name], _texts.sources[one.name]
                if one.name in sys.modules:
                    _hidden.setdefault(other, {})[one.name] = sys.modules.pop(one.name)
    for one in code:
        if one.name not in _owners:
            _owners[one.name], _texts.sources[one.name] = code, one
            if others:
                sys.modules.pop(one.name, None)
    sys.modules.update(_hidden.pop(code, {}))


def _imported(source: Source) -> Iterator[str]:
    """Yield the names of modules that `source` may import, packages before their modules."""
    try:
        with _parsing:
            tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError):  # which its import reports
        return
    is_package = Path(source.file).name == "__init__.py"
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            own = source.name.split(".")
            base = own[: len(own) + is_package - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        for name in names:
            yield from _with_packages(name)


class _Texts(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and executes modules of codes, the newest of each name."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}
        self.used: Code = ()  # the last one

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self.sources.get(name)
        if source is None:
            return None
        folder = Path(source.file).parent
        is_package = Path(source.file).name == "__init__.py"
        spec = importlib.util.spec_from_loader(
            name, self, origin=source.file, is_package=is_package
        )
        assert spec is not None
        spec.has_location = True  # so that it has __file__
        if is_package:
            spec.submodule_search_locations = [str(folder)]
        return spec

    def get_source(self, name: str) -> str:
        return importlib.util.decode_source(self.sources[name].text)

    def exec_module(self, module: ModuleType) -> None:
        source = self.sources[module.__name__]
        exec(compile(source.text, source.file, "exec"), module.__dict__)


_texts = _Texts()
_owners: dict[str, Code] = {}  # by a module's name, the code that it is of now
_hidden: dict[Code, dict[str, ModuleType]] = {}  # modules of codes that have lost their names
