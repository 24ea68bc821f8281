"""The engine facade: vLLM's `AsyncLLM` in a background thread, for scripts, notebooks and servers.

All methods may be called from any thread and any event loop; requests run side by side in vLLM's
batches. The engine's own loop runs in one daemon thread, the model in vLLM's engine process.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.engine.capturing import Capturing
from semkv_rag.engine.completion import Completion, join
from semkv_rag.engine.fingerprint import config_fingerprint
from semkv_rag.engine.gate import GateReport
from semkv_rag.engine.launch import resolve, transfer_config
from semkv_rag.engine.transfer import CAPTURE_KEY, PARAMS_KEY
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.report import ReuseReport
from semkv_rag.store import KVStore

T = TypeVar("T")


class Engine:
    """A model in vLLM, with a store of precomputed KV.

    Args:
        model: a folder or a hub name, as for vLLM.
        store: the store's folder, made when missing; None for plain vLLM.
        index_url: the SQL index, when it is not SQLite in the store's folder.
        reuse: the options of requests that bring none.
        chat_args: options of vLLM's chat, named as on its command line with `_` for `-`, such as
            `{"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}`.
        engine_args: fields of vLLM's `AsyncEngineArgs`, such as `dtype` or `max_model_len`.

    Attributes:
        model: as given.
        tokenizer: the model's Hugging Face tokenizer.
        max_model_len: the context window, in tokens.
        fingerprint: of everything that changes KV.
        gate: whether this model is served with reuse, and if not, why.
        store: the store, or None.
        reuse: as given.
        chat_args: as given.

    Raises:
        OptionError: an option cannot be used.
        StoreError: the store cannot be opened.
        EngineError: vLLM cannot be started.
    """

    def __init__(
        self,
        model: str,
        *,
        store: str | Path | None = None,
        index_url: str | None = None,
        reuse: ReuseOptions | None = None,
        chat_args: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        self.model = model
        self.chat_args = dict(chat_args or {})
        self.reuse = reuse or ReuseOptions()
        # What the fingerprint stands for, for people who look into the store.
        settings = {name: str(value) for name, value in engine_args.items()}
        self._description = {"model": model, **settings}
        self.store = None if store is None else KVStore(Path(store), index_url=index_url)
        transfer = None
        if self.store is not None:
            transfer = transfer_config(
                self.store.root, index_url=index_url, reuse=self.reuse, request_namespace=True
            )
        try:
            config, obstacle = resolve(model, engine_args, transfer)
            self.fingerprint = config_fingerprint(config)
            self._connected = obstacle is None
            self._ids = itertools.count()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="semkv-engine", daemon=True
            )
            self._thread.start()
        except BaseException:
            if self.store is not None:
                self.store.close()
            raise
        self._llm: AsyncLLM | None = None
        try:
            self._llm = self._call(self._start(config))
            self.gate = (
                self._call(self._ask_gate()) if obstacle is None else GateReport(False, obstacle)
            )
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise EngineError(f"vLLM did not start: {error}") from error
            raise
        self.tokenizer = self._llm.get_tokenizer()
        self.max_model_len: int = config.model_config.max_model_len
        # At exit the engine process must end before the interpreter takes our thread away.
        reference = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _close(reference)
        atexit.register(self._at_exit)

    # ---- answering -------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Completion:
        """Answer a prompt.

        Args:
            prompt: text, or tokens.
            sampling: fields of vLLM's `SamplingParams`, such as `temperature` or `max_tokens`.
            reuse: this request's options instead of the engine's.

        Raises:
            OptionError: an option or the prompt's length cannot be used.
            EngineError: the engine stopped.
        """
        return join(list(self.stream(prompt, sampling=sampling, reuse=reuse)))

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> list[Completion]:
        """Answer many prompts side by side; as `generate`, in the prompts' order."""
        params = self._params(sampling, reuse)

        async def all_of_them() -> list[Completion]:
            answers = [self._answer(prompt, params.clone()) for prompt in prompts]
            return list(await asyncio.gather(*answers))

        return self._call(all_of_them())

    async def agenerate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Completion:
        """As `generate`, for an event loop; cancelling it aborts the request."""
        params = self._params(sampling, reuse)
        return await asyncio.wrap_future(self._submit(self._answer(prompt, params)))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> Iterator[Completion]:
        """As `generate`, part by part. Closing the iterator aborts the request."""
        params = self._params(sampling, reuse)
        parts: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        pump = self._submit(self._pump(prompt, params, parts.put))

        def iterate() -> Iterator[Completion]:
            try:
                while (part := parts.get()) is not None:
                    yield part
                pump.result()
            finally:
                pump.cancel()

        return iterate()

    def astream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        reuse: ReuseOptions | None = None,
    ) -> AsyncIterator[Completion]:
        """As `stream`, for an event loop."""
        params = self._params(sampling, reuse)

        async def iterate() -> AsyncIterator[Completion]:
            parts: asyncio.Queue[Completion | None] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def put(part: Completion | None) -> None:
                with suppress(RuntimeError):  # the caller's loop is closed: nobody listens
                    loop.call_soon_threadsafe(parts.put_nowait, part)

            pump = self._submit(self._pump(prompt, params, put))
            try:
                while (part := await parts.get()) is not None:
                    yield part
                await asyncio.wrap_future(pump)
            finally:
                pump.cancel()

        return iterate()

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's prefix cache (L0); False when a request under way holds part of it."""

        async def reset() -> bool:
            assert self._llm is not None
            return bool(await self._llm.reset_prefix_cache())

        return self._call(reset())

    # ---- capturing -------------------------------------------------------------------------

    def capture(
        self, items: Iterable[CaptureItem], *, in_flight: int = 32
    ) -> Iterator[CaptureResult]:
        """Prefill chunks and write their files into the store; results come as they are ready.

        The index is left to the caller: see `semkv_rag.corpus`.

        Args:
            items: the chunks, of any number; taken as they are needed.
            in_flight: chunks that are computed or being written at a time.

        Raises:
            EngineError: the engine has no store, its model cannot be served with reuse, or it
                stopped.
        """
        if self.store is None:
            raise EngineError("the engine was started without a store: pass store=…")
        if not self.gate.servable:
            raise EngineError(f"this model cannot be served with reuse: {self.gate.reason}")
        self.store.add_model(self.fingerprint, self._description)
        return iter(Capturing(self._prefill_item, self._take_captures, items, in_flight))

    def _prefill_item(self, item: CaptureItem, skip_prefix_cache: bool) -> Future[Any]:
        wishes = {
            "namespace": item.namespace,
            CAPTURE_KEY: {"id": item.id, "kind": item.kind, "context": len(item.context)},
        }
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=skip_prefix_cache,
            extra_args={"kv_transfer_params": {PARAMS_KEY: wishes}},
        )
        return self._submit(self._answer([*item.context.tolist(), *item.tokens.tolist()], params))

    def _take_captures(self) -> list[list[dict[str, Any]]]:
        """What each rank has written since the last call."""

        async def ask() -> list[list[dict[str, Any]]]:
            assert self._llm is not None
            answer: list[list[dict[str, Any]]] = await self._llm.collective_rpc(
                "semkv_take_captures"
            )
            return answer

        return self._call(ask())

    # ---- the loop --------------------------------------------------------------------------

    async def _start(self, config: Any) -> AsyncLLM:
        with _script_left_alone():
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def _ask_gate(self) -> GateReport:
        assert self._llm is not None
        reports = [GateReport(**fields) for fields in await self._llm.collective_rpc("semkv_gate")]
        return next((report for report in reports if not report.servable), reports[0])

    def _params(
        self, sampling: Mapping[str, Any] | None, reuse: ReuseOptions | None
    ) -> SamplingParams:
        """vLLM's sampling parameters with our wishes in them; everything is checked here."""
        fields = dict(sampling or {})
        extra = dict(fields.pop("extra_args", None) or {})
        if self._connected:
            wishes = {PARAMS_KEY: (reuse or self.reuse).to_mapping()}
            extra["kv_transfer_params"] = {**extra.get("kv_transfer_params", {}), **wishes}
        try:
            return SamplingParams(
                **fields, extra_args=extra or None, output_kind=RequestOutputKind.DELTA
            )
        except (TypeError, ValueError, VLLMClientError) as error:
            raise OptionError(f"vLLM does not take these sampling parameters: {error}") from error

    async def _answer(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        return join([part async for part in self._parts(prompt, params)])

    async def _pump(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        put: Callable[[Completion | None], None],
    ) -> None:
        try:
            async for part in self._parts(prompt, params):
                put(part)
        finally:
            put(None)

    async def _parts(
        self, prompt: str | Sequence[int], params: SamplingParams
    ) -> AsyncIterator[Completion]:
        if self._llm is None:
            raise EngineError("the engine is closed")
        request_id = f"semkv-{next(self._ids)}"
        began = time.perf_counter()
        ttft_ms = 0.0
        given: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
        try:
            async for output in self._llm.generate(given, params, request_id):
                latency_ms = (time.perf_counter() - began) * 1000
                ttft_ms = ttft_ms or latency_ms
                yield self._part(output, ttft_ms, latency_ms)
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine stopped: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise OptionError(f"vLLM does not take this request: {error}") from error

    def _part(self, output: Any, ttft_ms: float, latency_ms: float) -> Completion:
        answer = output.outputs[0]
        prompt_tokens = len(output.prompt_token_ids or ())
        logprobs = None
        if answer.logprobs is not None:
            logprobs = tuple(
                {token: entry.logprob for token, entry in position.items()}
                for position in answer.logprobs
            )
        report = (output.kv_transfer_params or {}).get(PARAMS_KEY)
        if report is not None:
            reported = ReuseReport.from_mapping(report)
        else:
            reason = None if self._connected else f"no reuse: {self.gate.reason}"
            reported = ReuseReport(kv_cache="skip", prompt_tokens=prompt_tokens, reason=reason)
        return Completion(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            prompt_tokens=prompt_tokens,
            report=reported,
            ttft_ms=ttft_ms,
            latency_ms=latency_ms,
        )

    def _submit(self, work: Awaitable[T]) -> Future[T]:
        if not self._loop.is_running():
            if asyncio.iscoroutine(work):
                work.close()
            raise EngineError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]

    def _call(self, work: Awaitable[T]) -> T:
        """Run `work` in the engine's loop and wait for it; Ctrl-C cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine process and close the store. Requests under way are aborted."""
        if (handler := getattr(self, "_at_exit", None)) is not None:
            atexit.unregister(handler)
        if self._loop.is_running():
            if self._llm is not None:
                self._call(self._shutdown())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._llm = None
        if self.store is not None:
            self.store.close()

    async def _shutdown(self) -> None:
        assert self._llm is not None
        self._llm.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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


def _close(reference: weakref.ref[Engine]) -> None:
    if (engine := reference()) is not None:
        engine.close()
