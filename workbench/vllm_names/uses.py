"""What the package uses of vLLM, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from workbench.vllm_names.source import FunctionNode, statements

Name: TypeAlias = tuple[str, str | None]
"""A module of vLLM and a name in it; None for the module itself."""


@dataclass(frozen=True)
class Import:
    """An import, which needs one of several alternatives, each with all of its names.

    Attributes:
        place: the file and the line.
    """

    place: str
    alternatives: tuple[tuple[Name, ...], ...]


@dataclass(frozen=True)
class Subclass:
    """A class that stands on one of vLLM's.

    Attributes:
        bases: what its base may be, by platform.
        methods: its own, by name.
    """

    place: str
    name: str
    bases: tuple[Name, ...]
    methods: Mapping[str, FunctionNode]


@dataclass(frozen=True)
class Call:
    """A call of a function or class of vLLM; of a base's method where `method` says which."""

    place: str
    target: tuple[Name, ...]
    node: ast.Call
    method: str | None = None


@dataclass(frozen=True)
class Uses:
    """All of a package's."""

    imports: Sequence[Import]
    subclasses: Sequence[Subclass]
    calls: Sequence[Call]


def uses_of(package: Path) -> Uses:
    """What a package's files use of vLLM."""
    imports: list[Import] = []
    subclasses: list[Subclass] = []
    calls: list[Call] = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        place = str(path.relative_to(package.parent))
        known: dict[str, tuple[Name, ...]] = {}
        for one, names in _imports(tree.body, place):
            imports.append(one)
            for local, name in names:
                known[local] = (*known.get(local, ()), name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                subclasses += _subclass(node, known, place)
        calls += _calls(tree, known, place)
        for subclass in subclasses:
            if subclass.place.partition(":")[0] == place:
                calls += _super_calls(subclass, place)
    return Uses(imports, subclasses, calls)


def _imports(body: list[ast.stmt], place: str) -> Iterator[tuple[Import, list[tuple[str, Name]]]]:
    """Imports from vLLM; those that a `try` guards together, as alternatives."""
    guarded: set[ast.stmt] = set()
    for node in statements(body):
        if isinstance(node, ast.Try) and any(_catches_imports(one) for one in node.handlers):
            ways = [node.body, *(handler.body for handler in node.handlers)]
            named = [[name for one in way for name in _names(one)] for way in ways]
            guarded.update(one for way in ways for one in way)
            if any(named):
                names = tuple(tuple(name for _, name in way) for way in named)
                yield Import(f"{place}:{node.lineno}", names), [one for way in named for one in way]
        elif node not in guarded and (names_here := _names(node)):
            for local, name in names_here:
                yield Import(f"{place}:{node.lineno}", ((name,),)), [(local, name)]


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.type, ast.Name) and handler.type.id in (
        "ImportError",
        "ModuleNotFoundError",
    )


def _names(node: ast.stmt) -> list[tuple[str, Name]]:
    """The local names that a statement imports from vLLM."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        if module.partition(".")[0] == "vllm":
            return [(one.asname or one.name, (module, one.name)) for one in node.names]
    elif isinstance(node, ast.Import):
        modules = [one for one in node.names if one.name.partition(".")[0] == "vllm"]
        return [(one.asname or one.name, (one.name, None)) for one in modules]
    return []


def _subclass(
    node: ast.ClassDef, known: Mapping[str, tuple[Name, ...]], place: str
) -> Iterator[Subclass]:
    bases = [known[one.id] for one in node.bases if isinstance(one, ast.Name) and one.id in known]
    methods = {
        one.name: one
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for base in bases:
        yield Subclass(f"{place}:{node.lineno}", node.name, base, methods)


def _calls(tree: ast.AST, known: Mapping[str, tuple[Name, ...]], place: str) -> Iterator[Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in known:
            yield Call(f"{place}:{node.lineno}", known[function.id], node)


def _super_calls(subclass: Subclass, place: str) -> Iterator[Call]:
    for method in subclass.methods.values():
        for node in ast.walk(method):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if (
                isinstance(owner, ast.Call)
                and isinstance(owner.func, ast.Name)
                and owner.func.id == "super"
            ):
                yield Call(f"{place}:{node.lineno}", subclass.bases, node, node.func.attr)
