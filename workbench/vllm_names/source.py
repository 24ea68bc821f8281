"""A vLLM as source text, in a wheel or a folder: its modules' names, without importing any of it."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where a name comes from.

    Attributes:
        module: the module that defines it.
        node: what defines it; None for what comes from outside of vLLM, or a whole module.
    """

    module: str
    node: ast.AST | None = None


class Source:
    """vLLM's modules.

    Args:
        place: a wheel, or the folder that `vllm` is in.

    Raises:
        FileNotFoundError: there is no vLLM.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._trees: dict[str, ast.Module | None] = {}
        if place.is_file():
            self._wheel: zipfile.ZipFile | None = zipfile.ZipFile(place)
            self._files = set(self._wheel.namelist())
        else:
            self._wheel = None
            self._files = {str(one.relative_to(place)) for one in (place / "vllm").rglob("*.py")}
        if "vllm/__init__.py" not in self._files:
            raise FileNotFoundError(f"there is no vllm/__init__.py in {place}")

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree, or None where there is no such module."""
        if module not in self._trees:
            base = module.replace(".", "/")
            path = next(
                (p for p in (f"{base}.py", f"{base}/__init__.py") if p in self._files), None
            )
            self._trees[module] = None if path is None else ast.parse(self._read(path))
        return self._trees[module]

    def _read(self, path: str) -> bytes:
        return self._wheel.read(path) if self._wheel else (self.place / path).read_bytes()

    def find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Definition | None:
        """The definition of a module's name, through imports; None when there is none."""
        tree, key = self.tree(module), f"{module}:{name}"
        if tree is None or key in seen:
            return None
        seen |= {key}
        found: Definition | None = None
        for node in statements(tree.body):  # the last one counts, but a class more than an alias
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name == name:
                    found = Definition(module, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                    found = found or Definition(module, node)
            elif isinstance(node, ast.ImportFrom):
                found = self._imported(self._absolute(module, node), node, name, seen) or found
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        found = found or Definition(alias.name)
        if found is None and self.tree(f"{module}.{name}") is not None:
            found = Definition(f"{module}.{name}")
        return found or self._lazy(module, tree, name, seen)

    def _imported(
        self, origin: str, node: ast.ImportFrom, name: str, seen: frozenset[str]
    ) -> Definition | None:
        for alias in node.names:
            if alias.name == "*":
                if found := self.find(origin, name, seen):
                    return found
            elif (alias.asname or alias.name) == name:
                if origin.partition(".")[0] != "vllm":
                    return Definition(origin)
                return self.find(origin, alias.name, seen)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = module.replace(".", "/")
        parts = module.split(".")
        if f"{path}/__init__.py" not in self._files:
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _lazy(
        self, module: str, tree: ast.Module, name: str, seen: frozenset[str]
    ) -> Definition | None:
        """A name that the module's `__getattr__` gives, out of a dictionary by names."""
        if not any(
            isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in tree.body
        ):
            return None
        for node in ast.walk(tree):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if not isinstance(key, ast.Constant) or key.value != name:
                    continue
                if isinstance(value, ast.Constant) and ":" in str(value.value):
                    origin, _, attribute = str(value.value).partition(":")
                    origin = f"{module}{origin}" if origin.startswith(".") else origin
                    return self.find(origin, attribute, seen)
                return Definition(module, value)
        return None

    def bases(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases, as Python looks names up in them; those from outside have no node."""
        yield definition
        if not isinstance(definition.node, ast.ClassDef):
            return
        for base in definition.node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            name = target.id if isinstance(target, ast.Name) else ast.unparse(target)
            found = self.find(definition.module, name)
            yield from self.bases(found) if found else (Definition(name),)

    def method(self, definition: Definition, name: str) -> FunctionNode | None:
        """A method of a class or of one of its bases."""
        for base in self.bases(definition):
            for node in statements(getattr(base.node, "body", [])):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    return node
        return None

    def has_attribute(self, definition: Definition, name: str) -> bool:
        """Whether a class or one of its bases defines or sets an attribute, or its module does."""
        tree = self.tree(definition.module)
        for node in ast.walk(tree) if tree else ():
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and node.attr == name
            ):
                return True
        for base in self.bases(definition):
            for node in ast.walk(base.node) if base.node else ():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    return True
                if isinstance(node, ast.AnnAssign | ast.Assign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(_names(target, name) for target in targets):
                        return True
                if isinstance(node, ast.Constant) and node.value == name:  # a registered buffer
                    return True
        return False


def _names(target: ast.AST, name: str) -> bool:
    if isinstance(target, ast.Tuple):
        return any(_names(one, name) for one in target.elts)
    if isinstance(target, ast.Attribute):
        return (
            target.attr == name and isinstance(target.value, ast.Name) and target.value.id == "self"
        )
    return isinstance(target, ast.Name) and target.id == name


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under `if`, `try` and `with` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)
