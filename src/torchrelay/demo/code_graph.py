"""The code graph of Python sources: imports, definitions, inheritance, calls, parameters, and
raised and caught exceptions.

:func:`read_code_graph` reads any folder of sources with :mod:`ast`; :func:`split_facts` makes
train, valid and test.

Entities are named so that a person can read them::

    json.decoder                        a module
    json.decoder.JSONDecoder            a class
    json.decoder.JSONDecoder.decode     a method, as a thing that has been written
    .decode()                           a method's name, called on or defined by anything
    timeout=                            a parameter's name
    ValueError, len                     builtins
"""

from __future__ import annotations

import ast
import builtins
import random
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from torchrelay.demo.triples import SPLITS, Fact, Graph, graph_of
from torchrelay.errors import DataError

__all__ = [
    "code_graph",
    "prune",
    "read_code_graph",
    "split_facts",
    "standard_library",
    "standard_library_graph",
]

# Third-party packages, and tests: code about code, twice as much as the library itself.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

_FACTS_PER_ENTITY = 3
# The split is part of the data set, so the demo's --seed does not change it.
_SPLIT_SHARE, _SPLIT_SEED = 0.05, 0

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef
_Found = tuple[str, str, str | None]


def standard_library() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_graph() -> Graph:
    """Return the code graph of the standard library, split. Takes several seconds.

    Raises:
        DataError: the standard library has no sources here.
    """
    return code_graph(read_code_graph(standard_library()))


def code_graph(facts: Iterable[Fact]) -> Graph:
    """Return the graph of sorted facts, without entities that have few, split."""
    return graph_of(split_facts(prune(facts, _FACTS_PER_ENTITY), _SPLIT_SHARE, _SPLIT_SEED))


def _source_files(root: Path) -> list[Path]:
    """Return the sources below ``root``, sorted, without tests and third-party packages."""
    files = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(
        path for path in files if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )


def read_code_graph(root: Path, part: slice = slice(None)) -> list[Fact]:
    """Return the facts about the sources below ``root``, sorted and unique. Imports are resolved
    from ``root``.

    Args:
        part: the files to read, of all in order: processes that read a part each read all.

    Raises:
        DataError: there are no sources.
    """
    paths = {_module_name(root, path): path for path in _source_files(root)}
    if not paths:
        raise DataError(
            f"{root} has no Python sources: is the standard library installed as source?"
        )
    facts: set[Fact] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        for name, path in list(paths.items())[part]:
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # not of this version of Python
                continue
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            found = _Module(name, package, paths.keys(), tree).facts()
            facts.update((subject, relation, obj) for subject, relation, obj in found if obj)
    return sorted(facts)


def prune(facts: Iterable[Fact], at_least: int) -> list[Fact]:
    """Return the largest part of the graph in which each entity has ``at_least`` facts."""
    rest, kept = list(facts), None
    while rest != kept:
        kept = rest
        degree = Counter(name for subject, _, obj in kept for name in (subject, obj))
        rest = [fact for fact in kept if min(degree[fact[0]], degree[fact[2]]) >= at_least]
    return rest


def split_facts(facts: Sequence[Fact], share: float, seed: int) -> dict[str, list[Fact]]:
    """Split facts into train, valid and test; valid and test get a random ``share`` each.

    A fact leaves train only while its entities and its relation keep another one there, so valid
    and test contain nothing that train lacks. The same facts, share and seed give the same
    split.
    """
    wanted = int(len(facts) * share)
    left = Counter(name for fact in facts for name in _names(fact))
    splits: dict[str, list[Fact]] = {name: [] for name in SPLITS}
    for fact in random.Random(seed).sample(facts, len(facts)):
        target = next((name for name in SPLITS[1:] if len(splits[name]) < wanted), "train")
        needed = Counter(_names(fact))
        if target != "train" and all(left[name] > count for name, count in needed.items()):
            left.subtract(needed)
            splits[target].append(fact)
        else:
            splits["train"].append(fact)
    return splits


def _names(fact: Fact) -> tuple[str, str, str]:
    subject, relation, obj = fact
    return subject, f"relation {relation}", obj


def _module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _target(node: ast.AST) -> list[str]:
    """Return the parts of a dotted name, ``["os", "path", "join"]``; other expressions before a dot
    give ``""``.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Call) and not parts:
        return _target(node.func)
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return parts[::-1]


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Yield classes and functions of the module's scope, also those under ``if`` and ``try``."""
    nested = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            nested.append(child)
    for child in nested:
        yield from _definitions(child)


class _Module:
    """One source file, and the entities of its names."""

    def __init__(self, name: str, package: str, modules: Collection[str], tree: ast.Module) -> None:
        self.name, self.package, self.modules = name, package, modules
        self._imports = [
            bound
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for bound in self._aliases(node)
        ]
        self._defined = {node.name: node for node in _definitions(tree)}
        # Imported and defined names of the module's scope, and what they stand for:
        # {"join": "os.path.join"}.
        self._known = {local: entity for local, entity, _ in self._imports}
        self._known |= {local: f"{name}.{local}" for local in self._defined}
        self._variables = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def facts(self) -> Iterator[_Found]:
        """Yield all facts; those whose object is unknown or empty are none."""
        yield from ((self.name, "imports", module) for *_, module in self._imports)
        for definition in self._defined.values():
            yield from self._facts_about(definition, self.name, ())

    def _aliases(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
        """Yield each name that an import binds, its entity, and the module that the import runs."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                base = self.package.split(".")[: 1 - node.level or None] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                entity = f"{source}.{alias.name}"
                module = entity if entity in self.modules else source
                yield alias.asname or alias.name, entity, module
            else:
                top = alias.name.split(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top, alias.name

    def _facts_about(
        self, node: _Definition, owner: str, methods: Collection[str]
    ) -> Iterator[_Found]:
        """Yield the facts about a class or function in ``owner``: a module, or a class with
        ``methods``.
        """
        name = f"{owner}.{node.name}"
        yield owner, "defines", name
        for decorator in node.decorator_list:
            yield name, "is decorated by", self._resolve(decorator, owner, methods)
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield name, "inherits", self._resolve(base, owner, methods)
            functions = {one.name: one for one in node.body if isinstance(one, _Function)}
            for function in functions.values():
                yield name, "has method", f".{function.name}()"
                yield from self._facts_about(function, name, functions)
        else:
            yield from self._facts_inside(node, owner, methods)

    def _facts_inside(
        self, node: _Function, owner: str, methods: Collection[str]
    ) -> Iterator[_Found]:
        """Yield the facts about what a function takes and does."""
        name = f"{owner}.{node.name}"
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.arg not in ("self", "cls"):
                yield name, "takes", f"{argument.arg}="
        raised: set[ast.AST] = set()  # raise ValueError() is one fact, not a call besides
        for child in ast.walk(node):
            if isinstance(child, ast.Call) and child not in raised:
                yield name, "calls", self._resolve(child.func, owner, methods, called=True)
            elif isinstance(child, ast.Name) and child.id in self._variables:
                yield name, "uses", f"{self.name}.{child.id}"
            elif isinstance(child, ast.Attribute) and methods and child.attr not in methods:
                if isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
                    yield name, "uses", f"{owner}.{child.attr}"
            elif isinstance(child, ast.Raise) and child.exc is not None:
                raised.add(child.exc)
                yield name, "raises", self._resolve(child.exc, owner, methods)
            elif isinstance(child, ast.ExceptHandler) and child.type is not None:
                types = child.type.elts if isinstance(child.type, ast.Tuple) else [child.type]
                for caught in types:
                    yield name, "catches", self._resolve(caught, owner, methods)

    def _resolve(
        self, node: ast.AST, owner: str, methods: Collection[str], *, called: bool = False
    ) -> str | None:
        """Return the entity that an expression names; None for local variables and unnamed values.

        ``methods`` are those of the enclosing class, ``owner``, for ``self.``.
        """
        first, *rest = _target(node)
        if first in ("self", "cls") and len(rest) == 1 and rest[0] in methods:
            return f"{owner}.{rest[0]}"
        if first in self._known:
            return ".".join([self._known[first], *rest])
        if not rest:
            return first if hasattr(builtins, first) else None
        return f".{rest[-1]}()" if called else None
