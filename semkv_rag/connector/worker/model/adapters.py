"""LoRA adapters in a worker: which weights were loaded, and which rows of a forward use them.

vLLM's model applies to each row the adapter that a mapping names, and vLLM sets the mapping once for each
step. A blend's forwards have other rows, so they set their own and put vLLM's back: what is behind a
step's forward, the logits, still goes by it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest

from semkv_rag.connector.adapter import Adapter, adapter_digest
from semkv_rag.connector.worker.model.bare_rows import leave_bare_rows
from semkv_rag.errors import OptionError

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""The digest of files that changed while they were loaded, or could not be read."""


class OtherAdapter(Exception):
    """The weights that are loaded are not those that were asked for; the message says so in words."""


class Adapters:
    """The LoRA adapters that the worker has loaded; one per worker, in the thread of the model.

    Args:
        manager: vLLM's, of the model runner. Two of its methods are looked on at from now on.

    Attributes:
        most: so many different ones may be in one forward.
        most_tokens: so many rows may be in one forward.
    """

    def __init__(self, manager: Any, config: LoRAConfig, most_tokens: int) -> None:
        self.most, self.most_tokens = int(config.max_loras), most_tokens
        self._load, self._activate = manager._load_adapter, manager.set_active_adapters
        self._manager = manager
        self._digests: dict[int, str] = {}
        self._new: dict[int, str] = {}
        self._of_step: tuple[set[LoRARequest], Any] | None = None
        # vLLM has no hook there. Whatever loads an adapter or sets a step's rows, it ends here.
        manager._load_adapter = self._loading
        manager.set_active_adapters = self._activating

    def _loading(self, request: LoRARequest) -> Any:
        before = _digest(request)
        loaded = self._load(request)
        digest = before if _digest(request) == before else UNKNOWN
        if self._digests.get(request.lora_int_id) != digest:
            self._digests[request.lora_int_id] = self._new[request.lora_int_id] = digest
        return loaded

    def _activating(self, requests: set[LoRARequest], mapping: Any) -> None:
        self._of_step = {_kept(request) for request in requests}, mapping
        self._activate(requests, mapping)

    def end_step(self) -> None:
        """Nothing of the step goes by its adapters any more: they may be removed."""
        self._of_step = None

    def take_loaded(self) -> dict[int, str]:
        """The digests of what was loaded since the last call, by vLLM's number."""
        new, self._new = self._new, {}
        return new

    def fault(self, adapter: Adapter) -> str | None:
        """Why this adapter's rows cannot be computed, in words, or None. Loads it, if it was not."""
        try:
            self._manager.add_adapter(_kept(adapter.request))
        except Exception as error:
            logger.warning("semkv: a LoRA adapter could not be loaded: %r", error)
            return f"the LoRA adapter {adapter.request.lora_name} could not be loaded"
        finally:
            self._restore()  # it may have taken the place of one of the step's
        if not self.holds(adapter):
            return f"the LoRA adapter {adapter.request.lora_name} was loaded with other weights"
        return None

    def holds(self, adapter: Adapter) -> bool:
        """Whether the weights that were loaded last under its number are the adapter's."""
        return self._digests.get(adapter.request.lora_int_id) == adapter.digest

    @contextmanager
    def computing(self, rows: Sequence[tuple[Adapter | None, int]]) -> Iterator[None]:
        """Inside the block a forward's rows are computed with these adapters.

        Args:
            rows: in the forward's order, an adapter or None and how many rows it has.

        Raises:
            OtherAdapter: one of them was loaded with other weights.
        """
        numbers = [0 if one is None else one.request.lora_int_id for one, _ in rows]
        wanted = {one.request.lora_int_id: one for one, _ in rows if one is not None}
        counts = [count for _, count in rows]
        mapping = LoRAMapping(
            tuple(np.repeat(numbers, counts).tolist()), tuple(numbers), is_prefill=True
        )
        try:
            self._activate({_kept(one.request) for one in wanted.values()}, mapping)
            for one in wanted.values():
                if not self.holds(one):
                    raise OtherAdapter(
                        f"the LoRA adapter {one.request.lora_name} was loaded with other weights"
                    )
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        """Give vLLM back what it has set for the step."""
        if self._of_step is not None:
            self._activate(*self._of_step)


def adapters_of(runner: Any, config: VllmConfig) -> Adapters | None:
    """Those of a model runner; None where the engine serves none."""
    if (lora := config.lora_config) is None:
        return None
    if runner.device.type == "cpu":
        leave_bare_rows()
    return Adapters(runner.lora_manager, lora, config.scheduler_config.max_num_batched_tokens)


def _kept(request: LoRARequest) -> LoRARequest:
    """The request without the wish that it be loaded anew each time it is named."""
    kept = copy.copy(request)
    kept.load_inplace = False
    return kept


def _digest(request: LoRARequest) -> str:
    try:
        return adapter_digest(request.lora_path)
    except OptionError:
        return UNKNOWN
