"""vLLM's engine with our connector in this process, and clocks around what is called there."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.launch import WORKER, transfer_config
from semkv_rag.store import place_of


class Clock:
    """Adds up, by name, what calls of wrapped functions take, ms. Calls within calls count once."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._inside = False

    def wrap(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.ms[f"{getattr(owner, '__name__', owner)}.{name}"] += (
                    time.perf_counter() - began
                ) * 1000
                self._inside = False

        setattr(owner, name, timed)


def to_first_token(llm: LLM, prompt: list[int], name: str) -> float:
    """From handing a request in to its first token, ms."""
    engine = llm.llm_engine
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    given = {"prompt_token_ids": prompt, "cache_salt": "a tenant"}
    began = time.perf_counter()
    engine.add_request(name, given, params)
    while engine.has_unfinished_requests():
        if any(output.finished for output in engine.step()):
            taken = (time.perf_counter() - began) * 1000
    return taken


def connected(model: Path, store: Path, **engine_args: Any) -> LLM:
    """An engine with our connector over a store."""
    reuse = transfer_config(
        place_of(store), index_url=None, reuse=ReuseOptions(), request_namespace=False
    )
    return LLM(
        str(model),
        kv_transfer_config=KVTransferConfig(**reuse),
        worker_cls=WORKER,
        enforce_eager=True,
        scheduling_policy="priority",
        **engine_args,
    )
