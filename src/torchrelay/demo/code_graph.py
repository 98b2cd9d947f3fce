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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torchrelay.demo.triples import SPLITS, Fact, Graph, graph_of
from torchrelay.errors import DataError

__all__ = ["prune", "read_code_graph", "split_facts", "standard_library", "standard_library_graph"]

# Third-party packages, and tests: code about code, twice as much as the library itself.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

_FACTS_PER_ENTITY = 3
# The split is part of the data set, so the demo's --seed does not change it.
_SPLIT_SHARE, _SPLIT_SEED = 0.05, 0

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def standard_library() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_graph() -> Graph:
    """Return the code graph of the standard library, split. Takes several seconds.

    Raises:
        DataError: the standard library has no sources here.
    """
    facts = prune(read_code_graph(standard_library()), _FACTS_PER_ENTITY)
    return graph_of(split_facts(facts, _SPLIT_SHARE, _SPLIT_SEED))


def _source_files(root: Path) -> list[Path]:
    """Return the sources below ``root``, sorted, without tests and third-party packages."""
    files = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(
        path for path in files if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )


def read_code_graph(root: Path) -> list[Fact]:
    """Return all facts about the sources below ``root``, sorted and unique. Imports are resolved
    from ``root``.

    Raises:
        DataError: there are no sources.
    """
    paths = {_module_name(root, path): path for path in _source_files(root)}
    if not paths:
        raise DataError(
            f"{root} has no Python sources: is the standard library installed as source?"
        )
    facts: set[Fact] = set()
    for module, path in paths.items():
        tree = _parse(path)
        if tree is not None:
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            found = _Module(module, package, paths.keys(), tree).facts()
            facts.update((subject, relation, obj) for subject, relation, obj in found if obj)
    return sorted(facts)


def prune(facts: Iterable[Fact], at_least: int) -> list[Fact]:
    """Return the largest part of the graph in which each entity has ``at_least`` facts."""
    kept = list(facts)
    while True:
        degree = Counter(name for subject, _, obj in kept for name in (subject, obj))
        rest = [
            fact for fact in kept if degree[fact[0]] >= at_least and degree[fact[2]] >= at_least
        ]
        if len(rest) == len(kept):
            return rest
        kept = rest


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


def _parse(path: Path) -> ast.Module | None:
    """Return the syntax tree, or None for a file that this Python version cannot parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return None


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


def _definitions(tree: ast.Module) -> dict[str, ast.ClassDef | _Function]:
    """Return classes and functions of the module's scope, also those under ``if`` and ``try``."""
    found: dict[str, ast.ClassDef | _Function] = {}
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt)]
            pending += [c for handler in getattr(node, "handlers", []) for c in handler.body]
    return found


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
        self._defined = _definitions(tree)
        # Imported and defined names of the module's scope, and what they stand for:
        # {"join": "os.path.join"}.
        self._known = {local: entity for local, entity, _ in self._imports}
        self._known |= {local: f"{name}.{local}" for local in self._defined}
        # Variables of the module's scope: {"FLAGS": "json.decoder.FLAGS"}.
        self._variables = {
            target.id: f"{name}.{target.id}"
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def facts(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield all facts; those whose object is unknown or empty are none."""
        yield from ((self.name, "imports", module) for *_, module in self._imports)
        for local_name, definition in self._defined.items():
            name = f"{self.name}.{local_name}"
            yield self.name, "defines", name
            if isinstance(definition, ast.ClassDef):
                yield from self._class_facts(name, definition)
            else:
                yield from self._function_facts(name, definition, {})

    def _source(self, node: ast.ImportFrom) -> str:
        """Return the module of ``from ... import``, with leading dots resolved."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _aliases(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
        """Yield each name that an import binds, its entity, and the module that the import runs."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                source = self._source(node)
                entity = f"{source}.{alias.name}"
                module = entity if entity in self.modules else source
                yield alias.asname or alias.name, entity, module
            else:
                top = alias.name.split(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top, alias.name

    def _class_facts(self, name: str, node: ast.ClassDef) -> Iterator[tuple[str, str, str | None]]:
        functions = {item.name: item for item in node.body if isinstance(item, _Function)}
        methods = {method: f"{name}.{method}" for method in functions}
        for base in node.bases:
            yield name, "inherits", self._resolve(base, {})
        for decorator in node.decorator_list:
            yield name, "is decorated by", self._resolve(decorator, {})
        for method, function in functions.items():
            yield name, "has method", f".{method}()"
            yield name, "defines", methods[method]
            yield from self._function_facts(methods[method], function, methods)

    def _function_facts(
        self, name: str, node: _Function, methods: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str | None]]:
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.arg not in ("self", "cls"):
                yield name, "takes", f"{argument.arg}="
        for decorator in node.decorator_list:
            yield name, "is decorated by", self._resolve(decorator, methods)
        raised: set[ast.AST] = set()  # raise ValueError() is one fact, not a call besides
        for child in ast.walk(node):
            if isinstance(child, ast.Call) and child not in raised:
                yield name, "calls", self._resolve(child.func, methods, called=True)
            elif isinstance(child, ast.Name | ast.Attribute):
                yield name, "uses", self._variable(child, methods)
            elif isinstance(child, ast.Raise) and child.exc is not None:
                raised.add(child.exc)
                yield name, "raises", self._resolve(child.exc, methods)
            elif isinstance(child, ast.ExceptHandler) and child.type is not None:
                types = child.type.elts if isinstance(child.type, ast.Tuple) else [child.type]
                for caught in types:
                    yield name, "catches", self._resolve(caught, methods)

    def _variable(self, node: ast.Name | ast.Attribute, methods: Mapping[str, str]) -> str | None:
        """Return the module's variable or the class's attribute that an expression names,
        ``json.decoder.JSONDecoder.strict``.
        """
        if isinstance(node, ast.Name):
            return self._variables.get(node.id)
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if of_self and node.attr not in methods and methods:
            return f"{next(iter(methods.values())).rpartition('.')[0]}.{node.attr}"
        return None

    def _resolve(
        self, node: ast.AST, methods: Mapping[str, str], *, called: bool = False
    ) -> str | None:
        """Return the entity that an expression names; None for local variables and unnamed values.

        ``methods`` are those of the enclosing class, for ``self.``.
        """
        first, *rest = _target(node)
        if first in ("self", "cls") and len(rest) == 1 and rest[0] in methods:
            return methods[rest[0]]
        if first in self._known:
            return ".".join([self._known[first], *rest])
        if not rest:
            return first if hasattr(builtins, first) else None
        return f".{rest[-1]}()" if called else None
