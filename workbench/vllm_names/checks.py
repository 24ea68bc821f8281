"""The checks of the package's uses against a vLLM."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from workbench.vllm_names.signatures import miscall, misfilled, misfit
from workbench.vllm_names.source import Definition, Source, statements
from workbench.vllm_names.uses import Call, Import, Name, Subclass, Uses


def problems(
    uses: Uses, attributes: Mapping[str, Sequence[str]], source: Source, installed: Source
) -> Iterator[str]:
    """What does not fit, one line each.

    Args:
        attributes: of vLLM's classes, by `module:Class`, that the package reads or sets.
        source: the vLLM that is looked at.
        installed: the one that the package runs on: what overrides a method there must do so in the
            other one too.
    """
    for one in uses.imports:
        yield from _import_problems(one, source)
    for subclass in uses.subclasses:
        yield from _subclass_problems(subclass, source, installed)
    for call in uses.calls:
        yield from _call_problems(call, source)
    for where, names in attributes.items():
        module, _, cls = where.partition(":")
        found = source.find(module, cls)
        if found is None:
            yield f"{where} is not there"
            continue
        for name in names:
            if not source.has_attribute(found, name):
                yield f"{where} has no {name}"


def _import_problems(one: Import, source: Source) -> Iterator[str]:
    missing = [[name for name in names if not _exists(name, source)] for names in one.alternatives]
    if all(missing):
        for module, name in min(missing, key=len):
            yield f"{one.place}: {module} has no {name}" if name else f"{one.place}: no {module}"


def _exists(name: Name, source: Source) -> bool:
    module, attribute = name
    if attribute is None:
        return source.tree(module) is not None
    return source.find(module, attribute) is not None


def _subclass_problems(one: Subclass, source: Source, installed: Source) -> Iterator[str]:
    for base in one.bases:
        found = _definition(base, source)
        before = _definition(base, installed)
        if found is None:
            continue  # the import is missing
        for name, ours in one.methods.items():
            theirs = source.method(found, name)
            if theirs is None:
                if before is not None and installed.method(before, name) is not None:
                    yield f"{one.place}: {base[1]} has no {name}, which {one.name} overrides"
            elif name != "__init__" and (why := misfit(ours, theirs)):
                yield f"{one.place}: {one.name}.{name} does not fit {base[1]}'s: {why}"


def _call_problems(call: Call, source: Source) -> Iterator[str]:
    targets = [found for name in call.target if (found := _definition(name, source))]
    if not targets:
        return  # the import is missing
    reasons = [_misfit_of(call, target, source) for target in targets]
    if all(reasons):
        yield f"{call.place}: {ast.unparse(call.node.func)}: {reasons[0]}"


def _misfit_of(call: Call, target: Definition, source: Source) -> str | None:
    node = target.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return miscall(call.node, node, bound=False)
    if not isinstance(node, ast.ClassDef):
        return None
    if (method := source.method(target, call.method or "__init__")) is not None:
        return miscall(call.node, method, bound=True)
    classes = list(source.bases(target))
    if call.method is not None or any(one.node is None for one in classes):
        return None  # what stands outside of vLLM is not looked at
    return misfilled(call.node, _fields(classes))


def _fields(classes: Sequence[Definition]) -> dict[str, bool]:
    """A dataclass's fields in order, and whether each must be given."""
    fields: dict[str, bool] = {}
    for one in reversed(classes):
        for node in statements(getattr(one.node, "body", [])):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if not ast.unparse(node.annotation).startswith("ClassVar"):
                fields[node.target.id] = node.value is None
    return fields


def _definition(name: Name, source: Source) -> Definition | None:
    module, attribute = name
    return None if attribute is None else source.find(module, attribute)
