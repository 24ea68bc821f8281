"""The engines of a process, one for each (model, store, tiers, RAM tier, engine and chat arguments).

A model in memory is expensive, so all LLM objects with the same key share one, whatever framework they
are of. Engines are started at first use and end with the process, or by `close_engines`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv_rag.prompt_cache.named import prompt_cache_of
from semkv_rag.store.place import is_url

if TYPE_CHECKING:
    from semkv_rag.engine import Engine
    from semkv_rag.prompt_cache import Encoder, PromptCacheOptions

_engines: dict[str, Engine] = {}
_lock = threading.Lock()


def shared_engine(
    model: str,
    store: str | Path | None,
    index_url: str | None,
    engine_args: Mapping[str, Any],
    chat_args: Mapping[str, Any] | None = None,
    prompt_cache: PromptCacheOptions | Mapping[str, Any] | None = None,
    encoders: Mapping[str, str | Encoder] | None = None,
    ram_bytes: int = 0,
    lora: str | Path | None = None,
) -> Engine:
    """The process's engine for these arguments; the first call starts it, which takes a while.

    Args:
        store: a folder, or an object store's URL.
        engine_args: further arguments of `Engine`: its own options, such as `cache_dir`, or fields of
            `AsyncEngineArgs`.
        chat_args: options of vLLM's chat, as `Engine` takes them.
        prompt_cache: as `Engine` takes them, or a mapping of their fields.
        encoders: of the tiers, by layer; some by name, see `semkv_rag.prompt_cache.named`.
        ram_bytes: what stored chunks may take in memory, as `Engine` takes it.
        lora: the folder of a LoRA adapter that is to be served beside the model.

    Raises:
        MissingExtraError: vLLM is not installed.
        OptionError: an argument cannot be used.
        StoreError: the store cannot be opened.
        EngineError: vLLM does not start.
    """
    folder = None
    if store is not None:
        folder = str(store if is_url(store) else Path(store).resolve())
    if lora is not None:
        from semkv_rag.engine.adapters import serving_adapter

        engine_args = serving_adapter(lora, engine_args)
    options, made = prompt_cache_of(prompt_cache, encoders)
    given = [None if options is None else options.to_mapping(), dict(encoders or {})]
    named = [model, folder, index_url, dict(engine_args), dict(chat_args or {}), *given, ram_bytes]
    key = json.dumps(named, sort_keys=True, default=repr)
    with _lock:  # also while it starts: nobody is to start a second one
        if key not in _engines:
            from semkv_rag.engine import Engine

            _engines[key] = Engine(
                model,
                store=folder,
                index_url=index_url,
                chat_args=chat_args,
                prompt_cache=options,
                encoders=made,
                ram_bytes=ram_bytes,
                **engine_args,
            )
        return _engines[key]


def close_engines() -> None:
    """End all engines that were started here, for example to free their memory in a notebook.

    An LLM object that is used again starts its engine again.
    """
    with _lock:
        while _engines:
            _, engine = _engines.popitem()
            engine.close()
