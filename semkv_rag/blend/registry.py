"""Selectors by name: the built-in ones, those that a program registers, and those of installed packages.

A selector runs in vLLM's own processes. So its class must be importable there: `register_selector` notes
where it stands, the connector carries that over, and `load_selectors` imports it on the other side. A
package that offers selectors by the entry point group `semkv_rag.selectors` needs no call at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points

from semkv_rag.blend import selectors
from semkv_rag.blend.selectors import Selector
from semkv_rag.config import SELECTORS
from semkv_rag.errors import OptionError

ENTRY_POINTS = "semkv_rag.selectors"

_registered: dict[str, type[Selector]] = {}


def register_selector(name: str, selector: type[Selector]) -> None:
    """Let `ReuseOptions(selector=name)` pick by a selector of your own, in engines that start afterwards.

    Args:
        name: none of the built-in selectors' names.
        selector: a class at the top of a module. Its `needs_check_layer`, `needs_question` and
            `weighs_layers` say what it is given, and so what it costs (`semkv_rag.blend.charged_ratio`).

    Raises:
        OptionError: the name is taken, or vLLM's processes could not import the class.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in SELECTORS:
        raise OptionError(f"selector name {name!r}: use an identifier other than {_names()}")
    if not (isinstance(selector, type) and issubclass(selector, Selector)):
        raise OptionError(
            f"selector {name}: {selector!r} is no subclass of semkv_rag.blend.Selector"
        )
    if selector.__module__ == "__main__" or "." in selector.__qualname__:
        raise OptionError(
            f"selector {name}: vLLM's processes cannot import {selector.__qualname__} from"
            f" {selector.__module__}: put the class at the top of a module of its own"
        )
    if _registered.get(name, selector) is not selector:
        raise OptionError(f"selector {name}: another class has this name")
    _registered[name] = selector


def selector_type(name: str) -> type[Selector]:
    """The class of a selector.

    Raises:
        OptionError: there is none of that name.
    """
    if name in SELECTORS:
        kind: type[Selector] = getattr(selectors, SELECTORS[name])
        return kind
    if name not in _registered:
        for offered in entry_points(group=ENTRY_POINTS, name=name):
            register_selector(name, offered.load())
    if name not in _registered:
        raise OptionError(f"selector is {name!r}: use one of {_names()}, or register it")
    return _registered[name]


def registered_selectors() -> dict[str, str]:
    """What `load_selectors` takes: each registered name with its class, as `module:class`."""
    return {name: f"{one.__module__}:{one.__qualname__}" for name, one in _registered.items()}


def load_selectors(places: Mapping[str, str]) -> None:
    """Register in this process what is registered in the one that started it.

    Raises:
        OptionError: a class cannot be imported here.
    """
    for name, place in places.items():
        module, _, kind = place.partition(":")
        try:
            register_selector(name, getattr(importlib.import_module(module), kind))
        except (ImportError, AttributeError) as error:
            raise OptionError(f"selector {name}: {place} cannot be imported: {error}") from error


def _names() -> str:
    return ", ".join((*SELECTORS, *_registered))
