"""The options that both frameworks' LLM classes take, checked and merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semkv_rag.config import ReuseOptions, options_over
from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache.named import prompt_cache_of

REUSE_FIELDS = (
    "preset",
    "ratio",
    "selector",
    "check_layer",
    "question_tokens",
    "token_map",
    "namespace",
)
"""Options of reuse, of an object or of one call."""
PROMPT_CACHE_FIELDS = ("prompt_cache", "encoders")
ENGINE_FIELDS = (
    "store",
    "index_url",
    "engine_args",
    "chat_args",
    "ram_bytes",
    *PROMPT_CACHE_FIELDS,
)
"""What an engine is started with: of no use where there is one, or a server."""


def check_options(options: Any) -> None:
    """Check what makes no sense together.

    Args:
        options: an object with `model`, `base_url`, `lora`, the fields above, and nothing that
            contradicts an engine of its own.

    Raises:
        OptionError: which of them, and what to give instead.
    """
    if options.base_url is None and options.model is None:
        raise OptionError("give a model, an engine or a base_url")
    given = [name for name in ENGINE_FIELDS if getattr(options, name)]
    if options.base_url is not None and given:
        decided = f"with base_url, {', '.join(given)} are the server's"
        if not set(given).isdisjoint(PROMPT_CACHE_FIELDS):
            decided += ": it decides, by semkv serve … --prompt-cache '{}'"
        raise OptionError(decided)
    if options.base_url is not None and options.lora is not None:
        raise OptionError(
            "with base_url, lora is the server's: give the name that it serves the adapter by as model"
        )
    if options.prompt_cache is not None and options.store is None:
        raise OptionError("prompt_cache needs a store: give store=…")
    if options.ram_bytes and options.store is None:
        raise OptionError("ram_bytes needs a store: give store=…")
    prompt_cache_of(options.prompt_cache, options.encoders)
    ReuseOptions.from_mapping(reuse_options(options, {}))


def reuse_options(options: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were set, a call's over the object's; the others the engine or the server chooses.

    Args:
        options: an object with `reuse` and the fields of `REUSE_FIELDS`.
    """
    given = options_over(
        {name: call[name] for name in REUSE_FIELDS if name in call},
        {name: getattr(options, name) for name in REUSE_FIELDS},
    )
    if not call.get("reuse", options.reuse):
        given["enabled"] = False
    return given
