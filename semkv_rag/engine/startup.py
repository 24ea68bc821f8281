"""vLLM started with our connector, and what stands around it: for `Engine` and for `semkv serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from semkv_rag.connector.capture_results import ADDRESS_KEY, CaptureResults
from semkv_rag.connector.cores import cores_of_its_own
from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.connector.messages import GateReport, of_all_ranks
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.cpu_dtype import slow_dtype
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.prompt_cache import Cascade, Encoder, PromptCacheOptions
from semkv_rag.store import KVStore
from semkv_rag.store.objects.objects import used_in_this_process

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """vLLM, running.

    Attributes:
        fingerprint: of everything that changes KV.
        gate: whether the model is served with reuse.
        capturer: stores chunks; None without a store.
    """

    llm: ReportingLLM
    fingerprint: str
    gate: GateReport
    capturer: LLMCapturer | None


async def start(
    config: VllmConfig,
    obstacle: str | None,
    *,
    store: KVStore | None,
    description: Mapping[str, str],
    prompt_cache: PromptCacheOptions | None = None,
    encoders: Mapping[str, Encoder] | None = None,
    in_flight: int,
    **client: Any,
) -> Started:
    """Start vLLM's engine for the event loop that runs this.

    Args:
        config, obstacle: from `semkv_rag.engine.launch.resolve`.
        store: where chunks are stored.
        description: what the model's fingerprint stands for, for people who look into the store.
        prompt_cache: how whole prompts that resemble an earlier one are found; None for not at all.
        encoders: of the tiers; see `semkv_rag.prompt_cache.Cascade`.
        in_flight: chunks of one capture that are computed or being written at a time.
        client: options of vLLM's engine client.

    Raises:
        EngineError: the model's files are not on this machine.
        MissingExtraError: what the prompt cache needs is not installed.
        StoreError: what the prompt cache has stored cannot be read.
    """
    fingerprint = config_fingerprint(config)
    if slow := slow_dtype(config):
        logger.warning("semkv: %s", slow)
    if used_in_this_process():  # its threads are not in a fork
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    results = _capture_results(config)
    try:
        with _script_left_alone(), cores_of_its_own(config.parallel_config.world_size):
            llm: ReportingLLM = ReportingLLM.from_vllm_config(config, **client)
    except BaseException:
        if results is not None:
            results.close()
        raise
    llm.store, llm.fingerprint, llm.capture_results = store, fingerprint, results
    llm.plain_reason = None if obstacle is None else f"no reuse: {obstacle}"
    try:
        gate = GateReport(False, obstacle) if obstacle is not None else await _ask_gate(llm)
        if store is None:
            return Started(llm, fingerprint, gate, None)
        capturer = LLMCapturer(
            llm,
            asyncio.get_running_loop(),
            store=store,
            fingerprint=fingerprint,
            description=description,
            gate=gate,
            ranks=config.parallel_config.world_size,
            results=results,
            in_flight=in_flight,
        )
        if prompt_cache is not None and gate.servable:
            cascade = Cascade(store, fingerprint, prompt_cache, encoders)
            await asyncio.to_thread(cascade.load)
            llm.prompt_lookup = PromptLookup(cascade, capturer, llm)
        return Started(llm, fingerprint, gate, capturer)
    except BaseException:
        await asyncio.to_thread(llm.shutdown)
        raise


def _capture_results(config: VllmConfig) -> CaptureResults | None:
    """What the workers will find in their configuration to tell of captures; None without a connector."""
    if config.kv_transfer_config is None:
        return None
    results = CaptureResults()
    config.kv_transfer_config.kv_connector_extra_config[ADDRESS_KEY] = results.address
    return results


async def _ask_gate(llm: Any) -> GateReport:
    """What the gates of all ranks found."""
    return of_all_ranks([GateReport(**one) for one in await llm.collective_rpc("semkv_gate")])


@contextmanager
def _script_left_alone() -> Iterator[None]:
    """Start processes that do not run the user's script again.

    A spawned process imports the main module first; a script without an `if __name__ == "__main__"`
    around it would start another engine there, and fail. vLLM's processes need nothing of it.
    """
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file
