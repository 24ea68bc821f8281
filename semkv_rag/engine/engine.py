"""The engine facade: vLLM's `AsyncLLM` in a background thread, for scripts, notebooks and servers.

All methods may be called from any thread and any event loop; requests run side by side in vLLM's
batches. The engine's own loop runs in one daemon thread, the model in vLLM's engine process.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from semkv_rag.closing import Closing
from semkv_rag.config import ReuseOptions
from semkv_rag.engine.asking import Prompt, parts, sampling_params
from semkv_rag.engine.bridge import Stream, stream_async
from semkv_rag.engine.chat import ChatService, ChatSettings
from semkv_rag.engine.checking import Checking
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.completion import Completion, join
from semkv_rag.engine.counted import Counted
from semkv_rag.engine.launch import engine_arguments, kv_bytes_per_token, resolve, transfer_config
from semkv_rag.engine.loop import EngineLoop
from semkv_rag.engine.openai_answers import OpenAIAnswers
from semkv_rag.engine.startup import Started, start
from semkv_rag.engine.storing import Storing
from semkv_rag.errors import EngineError, OptionError, SemKVError
from semkv_rag.model_name import check_model
from semkv_rag.prompt_cache import Encoder, PromptCacheOptions
from semkv_rag.store import KVStore, StorePlace, place_of
from semkv_rag.store.codecs import PLAIN, codec_named

CAPTURES_IN_FLIGHT = 32


class Engine(OpenAIAnswers, Storing, Checking, Counted, Closing):
    """A model in vLLM, with a store of precomputed KV.

    Args:
        model: a folder or a hub name, as for vLLM.
        store: the store's folder, made when missing, or the URL of an object store, such as
            `s3://bucket/prefix`; None for plain vLLM.
        index_url: the SQL index, when it is not SQLite in the store's folder.
        cache_dir, cache_bytes, fetch_timeout_ms: with a URL, as `semkv_rag.store.place_of` takes them.
        reuse: the options of requests that bring none.
        chat_args: options of vLLM's chat, named as on its command line with `_` for `-`, such as
            `{"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}`.
        prompt_cache: how whole prompts that resemble an earlier one are found and stored; None for not at
            all. Needs a store and the extra `prompt-cache`.
        ram_bytes: what stored chunks may take in memory, where the next request finds them read and
            verified; 0 for none. Taken from the system at once.
        codec: by which chunks are stored from now on: `plain`, or a lossy one that takes less space, see
            docs/codecs.md. Stored ones are read by their own.
        encoders: of the tiers, by layer; see `semkv_rag.prompt_cache.Cascade`.
        engine_args: fields of vLLM's `AsyncEngineArgs`, such as `dtype` or `max_model_len`.

    Attributes:
        model: its folder or name.
        tokenizer: the model's Hugging Face tokenizer.
        max_model_len: the context window, in tokens.
        kv_bytes_per_token: what a token's KV takes in the store.
        fingerprint: of everything that changes KV.
        gate: whether this model is served with reuse, and if not, why.
        store: the store, or None.
        reuse: as given.

    Raises:
        OptionError: an option cannot be used.
        StoreError: the store cannot be opened.
        EngineError: vLLM cannot be started.
        MissingExtraError: what the tiers need is not installed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        store: str | Path | StorePlace | None = None,
        index_url: str | None = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        fetch_timeout_ms: float | None = None,
        reuse: ReuseOptions | None = None,
        chat_args: Mapping[str, Any] | None = None,
        prompt_cache: PromptCacheOptions | None = None,
        ram_bytes: int = 0,
        codec: str = PLAIN,
        encoders: Mapping[str, Encoder] | None = None,
        **engine_args: Any,
    ) -> None:
        if prompt_cache is not None and store is None:
            raise OptionError("prompt_cache needs a store: pass store=…")
        if ram_bytes and store is None:
            raise OptionError("ram_bytes needs a store: pass store=…")
        if codec_named(codec).name != PLAIN and store is None:
            raise OptionError("codec needs a store: pass store=…")
        self.model = model = str(model)
        check_model(model, engine_args.get("download_dir"))
        self.reuse = reuse or ReuseOptions()
        self._llm: ReportingLLM | None = None
        self._ids = itertools.count()
        self.store: KVStore | None = None
        if store is not None:
            place = place_of(
                store,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                fetch_timeout_ms=fetch_timeout_ms,
            )
            self.store = KVStore(place, index_url=index_url)
        self._loop = EngineLoop()
        try:
            transfer = None
            if self.store is not None:
                transfer = transfer_config(
                    self.store.place,
                    index_url=index_url,
                    reuse=self.reuse,
                    request_namespace=True,
                    ram_bytes=ram_bytes,
                    codec=codec,
                )
            config, obstacle = resolve(engine_arguments(model, engine_args), transfer)
            self._chat_settings = ChatSettings(config, model, chat_args or {})
            started = self._start(
                start(
                    config,
                    obstacle,
                    store=self.store,
                    description={"model": model, **{k: str(v) for k, v in engine_args.items()}},
                    prompt_cache=prompt_cache,
                    encoders=encoders,
                    in_flight=CAPTURES_IN_FLIGHT,
                    # vLLM's spans need its own times.
                    disable_log_stats=config.observability_config.otlp_traces_endpoint is None,
                )
            )
        except BaseException:
            self.close()
            raise
        self._llm, self.gate, self._capturer = started.llm, started.gate, started.capturer
        self._service = ChatService(self._llm, self._chat_settings)
        self.fingerprint = started.fingerprint
        self.tokenizer = self._llm.get_tokenizer()
        self.max_model_len: int = config.model_config.max_model_len
        self.kv_bytes_per_token = kv_bytes_per_token(config)
        # At exit the engine process must end before the interpreter takes our thread away.
        reference = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _close(reference)
        atexit.register(self._at_exit)

    def _start(self, starting: Coroutine[Any, Any, Started]) -> Started:
        try:
            return self._loop.call(starting)
        except SemKVError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not start: {error}") from error

    # ---- answering -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Completion:
        """Answer a prompt.

        Args:
            prompt: text, tokens, or vLLM's dictionary of a prompt, for one with images.
            sampling: fields of vLLM's `SamplingParams`, such as `temperature` or `max_tokens`.
            reuse: this request's options instead of the engine's.
            lora_request: vLLM's, of a LoRA adapter in a folder; needs `enable_lora=True`.

        Raises:
            OptionError: an option or the prompt's length cannot be used, or the adapter.
            EngineError: the engine stopped.
        """
        return join(
            list(self.stream(prompt, sampling=sampling, reuse=reuse, lora_request=lora_request))
        )

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[Completion]:
        """Answer many prompts side by side; as `generate`, in the prompts' order."""
        params = sampling_params(sampling, reuse or self.reuse)

        async def all_of_them() -> list[Completion]:
            answers = [self._answer(prompt, params.clone(), lora_request) for prompt in prompts]
            return list(await asyncio.gather(*answers))

        return self._loop.call(all_of_them())

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Completion:
        """As `generate`, for an event loop; cancelling it aborts the request."""
        params = sampling_params(sampling, reuse or self.reuse)
        return await asyncio.wrap_future(
            self._loop.submit(self._answer(prompt, params, lora_request))
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, part by part. Closing the iterator aborts the request."""
        params = sampling_params(sampling, reuse or self.reuse)
        return Stream(self._loop.submit, self._parts(prompt, params, lora_request))

    def astream(
        self,
        prompt: Prompt,
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[Completion]:
        """As `stream`, for an event loop."""
        params = sampling_params(sampling, reuse or self.reuse)
        return stream_async(self._loop.submit, self._parts(prompt, params, lora_request))

    @property
    def has_prompt_cache(self) -> bool:
        """Whether whole prompts are looked up before they are answered."""
        return self._llm is not None and self._llm.prompt_lookup is not None

    async def _answer(self, prompt: Prompt, params: Any, lora: LoRARequest | None) -> Completion:
        return join([part async for part in self._parts(prompt, params, lora)])

    async def _parts(
        self, prompt: Prompt, params: Any, lora: LoRARequest | None
    ) -> AsyncIterator[Completion]:
        llm, request_id = self._running(), self._request_id()
        async for part in parts(llm, prompt, params, request_id, lora):
            yield part

    def _request_id(self) -> str:
        return f"semkv-{next(self._ids)}"

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine process and close the store. Requests under way are aborted."""
        if (handler := getattr(self, "_at_exit", None)) is not None:
            atexit.unregister(handler)
        if self._llm is not None:
            if self._llm.prompt_lookup is not None:
                self._llm.prompt_lookup.close()
            if self._loop.running:
                self._loop.call(_shut_down(self._llm))
        self._loop.close()
        self._llm = None
        if self.store is not None:
            self.store.close()


async def _shut_down(llm: ReportingLLM) -> None:
    llm.shutdown()


def _close(reference: weakref.ref[Engine]) -> None:
    if (engine := reference()) is not None:
        engine.close()
