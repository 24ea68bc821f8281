"""Selectors by name: the built-in ones, those that a program registers, and those of installed packages.

Names are known here without torch; a class is imported when it is asked for. A selector runs in vLLM's
own processes. So its class must be importable there: `register_selector` notes where it stands, the
connector carries that over, and `load_selectors` takes it in on the other side. A package that offers
selectors by the entry point group `semkv_rag.selectors` needs no call at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from semkv_rag.errors import OptionError

if TYPE_CHECKING:
    from semkv_rag.blend.selectors import Selector

ENTRY_POINTS = "semkv_rag.selectors"

_HOME = "semkv_rag.blend.selectors"
SELECTORS: Mapping[str, str] = {
    "sensitivity_attention": f"{_HOME}:SensitivityAttention",
    "query_attention": f"{_HOME}:QueryAttention",
    "kv_deviation": f"{_HOME}:KVDeviation",
    "chunk_head": f"{_HOME}:ChunkHead",
    "none": f"{_HOME}:Unscored",
    "all": f"{_HOME}:Unscored",
}
"""The built-in selectors, each with its class."""

_registered: dict[str, str] = {}


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
    _required(name, selector)
    if selector.__module__ == "__main__" or "." in selector.__qualname__:
        raise OptionError(
            f"selector {name}: vLLM's processes cannot import {selector.__qualname__} from"
            f" {selector.__module__}: put the class at the top of a module of its own"
        )
    place = f"{selector.__module__}:{selector.__qualname__}"
    if _registered.setdefault(name, place) != place:
        raise OptionError(f"selector {name}: another class has this name")


def selector_type(name: str) -> type[Selector]:
    """The class of a selector.

    Raises:
        OptionError: there is none of that name, or it cannot be imported.
    """
    place = SELECTORS.get(name) or _registered.get(name) or _offered().get(name)
    if place is None:
        raise OptionError(f"selector is {name!r}: use one of {_names()}, or register it")
    module, _, kind = place.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"selector {name}: {place} cannot be imported: {error}") from error
    return _required(name, found)


def registered_selectors() -> dict[str, str]:
    """What `load_selectors` takes: each registered name with its class, as `module:class`."""
    return dict(_registered)


def load_selectors(places: Mapping[str, str]) -> None:
    """Register in this process what is registered in the one that started it."""
    _registered.update(places)


def check_selector(name: object, *, knows_risk: bool) -> None:
    """Raise OptionError unless there is such a selector.

    Args:
        knows_risk: whether it has to be one whose blends say how far off they are expected to be.
    """
    if not isinstance(name, str):
        raise OptionError(f"selector is {name!r}: use one of {_names()}")
    if name in SELECTORS and not knows_risk:
        return
    if not selector_type(name).weighs_layers and knows_risk:
        raise OptionError(
            f"ratio is auto, which selector {name} cannot do: use sensitivity_attention"
        )


def _required(name: str, given: Any) -> type[Selector]:
    """`given`, when it is a selector's class."""
    base: type[Selector] = importlib.import_module(_HOME).Selector
    if not (isinstance(given, type) and issubclass(given, base)):
        raise OptionError(f"selector {name}: {given!r} is no subclass of semkv_rag.blend.Selector")
    return given


@cache
def _offered() -> dict[str, str]:
    """Installed packages' selectors; looked for once, since any request may name one that is none."""
    return {one.name: one.value for one in entry_points(group=ENTRY_POINTS)}


def _names() -> str:
    return ", ".join((*SELECTORS, *_registered, *_offered()))
