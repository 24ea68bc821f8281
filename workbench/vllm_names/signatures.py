"""Whether a method fits the one that it overrides, and a call the function that it calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from workbench.vllm_names.source import FunctionNode

KINDS = ("property", "classmethod", "staticmethod")


def misfit(ours: FunctionNode, theirs: FunctionNode) -> str | None:
    """Why a method cannot stand in for the one that it overrides, in words, or None."""
    for kind in KINDS:
        if _decorated(ours, kind) != _decorated(theirs, kind):
            return f"one of the two is a {kind}"
    if _is_async(ours) != _is_async(theirs):
        return "one of the two is async"
    our_names, their_names = _positional(ours), _positional(theirs)
    for index, name in enumerate(their_names):
        if index >= len(our_names):
            if ours.args.vararg is None:
                return f"it takes no {name}"
        elif our_names[index].lstrip("_") != name.lstrip("_"):
            return f"its {our_names[index]} is {name} there"
    takes = {*our_names, *(one.arg for one in ours.args.kwonlyargs)}
    for one in theirs.args.kwonlyargs:
        if one.arg not in takes and ours.args.kwarg is None:
            return f"it takes no {one.arg}"
    for theirs_rest, ours_rest in (
        (theirs.args.vararg, ours.args.vararg),
        (theirs.args.kwarg, ours.args.kwarg),
    ):
        if theirs_rest is not None and ours_rest is None:
            return f"it takes no further arguments ({theirs_rest.arg})"
    given = {*their_names, *(one.arg for one in theirs.args.kwonlyargs)}
    missing = sorted(_required(ours) - given)
    return f"nobody gives it {', '.join(missing)}" if missing else None


def miscall(call: ast.Call, function: FunctionNode, *, bound: bool) -> str | None:
    """Why a call does not fit, in words, or None.

    Args:
        bound: whether the first parameter is given without being written.
    """
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    if any(one.arg is None for one in call.keywords):
        return None
    names = _positional(function, bound=bound)
    if len(call.args) > len(names) and function.args.vararg is None:
        return f"it takes {len(names)} arguments by position"
    keywords = {one.arg for one in call.keywords if one.arg is not None}
    takes = {*names, *(one.arg for one in function.args.kwonlyargs)}
    unknown = sorted(keywords - takes)
    if unknown and function.args.kwarg is None:
        return f"it takes no {', '.join(unknown)}"
    missing = sorted(_required(function, bound=bound) - keywords - set(names[: len(call.args)]))
    return f"it is not given {', '.join(missing)}" if missing else None


def misfilled(call: ast.Call, fields: dict[str, bool]) -> str | None:
    """Why a call does not fit a class of fields, in words, or None.

    Args:
        fields: by name, in order, whether each must be given.
    """
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    if any(one.arg is None for one in call.keywords):
        return None
    given = {*list(fields)[: len(call.args)], *(str(one.arg) for one in call.keywords)}
    if unknown := sorted(given - fields.keys()):
        return f"it has no {', '.join(unknown)}"
    missing = sorted(name for name, needed in fields.items() if needed and name not in given)
    return f"it is not given {', '.join(missing)}" if missing else None


def _decorated(function: FunctionNode, kind: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == kind for one in function.decorator_list)


def _is_async(function: FunctionNode) -> bool:
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    returns = ast.unparse(function.returns) if function.returns else ""
    return returns.startswith(("AsyncIterator", "AsyncGenerator", "Awaitable", "Coroutine"))


def _positional(function: FunctionNode, *, bound: bool = True) -> list[str]:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if bound and not _decorated(function, "staticmethod") else names


def _required(function: FunctionNode, *, bound: bool = True) -> set[str]:
    """The parameters without a default."""
    names = _positional(function, bound=bound)
    return {*names[: len(names) - len(function.args.defaults)], *_required_keywords(function)}


def _required_keywords(function: FunctionNode) -> Iterator[str]:
    for one, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if default is None:
            yield one.arg
