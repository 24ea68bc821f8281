"""The engines of a process, one for each (model, store, engine arguments).

A model in memory is expensive, so all `SemKV` objects with the same key share one. Engines are started
at first use and end with the process, or by `close_engines`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semkv_rag.engine import Engine

_engines: dict[str, Engine] = {}
_lock = threading.Lock()


def shared_engine(
    model: str, store: str | Path | None, index_url: str | None, engine_args: Mapping[str, Any]
) -> Engine:
    """The process's engine for these arguments; the first call starts it, which takes a while.

    Raises:
        MissingExtraError: vLLM is not installed.
        OptionError: an argument cannot be used.
        StoreError: the store cannot be opened.
        EngineError: vLLM does not start.
    """
    folder = None if store is None else str(Path(store).resolve())
    key = json.dumps([model, folder, index_url, engine_args], sort_keys=True, default=repr)
    with _lock:  # also while it starts: nobody is to start a second one
        if key not in _engines:
            from semkv_rag.engine import Engine

            _engines[key] = Engine(model, store=folder, index_url=index_url, **engine_args)
        return _engines[key]


def close_engines() -> None:
    """End all engines that were started here, for example to free their memory in a notebook.

    A `SemKV` that is used again starts its engine again.
    """
    with _lock:
        while _engines:
            _, engine = _engines.popitem()
            engine.close()
