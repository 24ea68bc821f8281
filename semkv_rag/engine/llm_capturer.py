"""The `Capturer` over a running vLLM: for the engine in this process and for the server's routes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextvars import Context
from copy import copy
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from semkv_rag.connector.adapter import Adapter, adapter_digest, adapter_model
from semkv_rag.connector.capture_results import CaptureResults
from semkv_rag.connector.messages import Captured, GateReport
from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.engine.capturing import WRITE_TIMEOUT_SECONDS, Capturing
from semkv_rag.engine.client import CAPTURE_PREFIX, ReportingLLM
from semkv_rag.engine.launch import kv_bytes_per_token
from semkv_rag.engine.tickets import Tickets
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.reuse.tokens import TokenArray
from semkv_rag.store import KVStore
from semkv_rag.wire import CAPTURE_KEY, PARAMS_KEY, TRANSFER_FIELD

TAKE_POLL_SECONDS = 1.0
"""While an answer is waited for, it is seen this often whether the engine still gives any."""


class LLMCapturer:
    """Prefills chunks and has their files written. Not to be used from the loop's own thread.

    Args:
        llm: vLLM; it runs in `loop`.
        loop: the event loop of another thread.
        store: where the files are written.
        fingerprint: the model's.
        description: what the fingerprint stands for.
        gate: whether the model is served with reuse.
        ranks: of the engine.
        results: through which its workers tell what became of captures; None where they are asked.
        in_flight: chunks of one capture that are computed or being written at a time.
    """

    def __init__(
        self,
        llm: ReportingLLM,
        loop: asyncio.AbstractEventLoop,
        *,
        store: KVStore,
        fingerprint: str,
        description: Mapping[str, str],
        gate: GateReport,
        ranks: int,
        results: CaptureResults | None = None,
        in_flight: int = 32,
    ) -> None:
        self.store = store
        self.fingerprint = fingerprint
        self.description = description
        self.tokenizer: Any = llm.get_tokenizer()
        self.max_model_len: int = llm.model_config.max_model_len
        self._llm = llm
        self._loop = loop
        self._gate = gate
        self._in_flight = in_flight
        self._ids = itertools.count()
        self._tickets = Tickets(self._take_captured, ranks)
        if results is not None:
            results.deliver(self._tickets.tell)
        self._adapter: Adapter | None = None

    def with_adapter(self, lora: LoRARequest) -> LLMCapturer:
        """The capturer of the model with an adapter, over the same engine.

        Raises:
            OptionError: the engine serves no adapters, or there is none in the folder.
        """
        digest, config = adapter_digest(lora.lora_path), self._llm.vllm_config.lora_config
        other = copy(self)
        other.fingerprint = adapter_model(self.fingerprint, digest, config)
        other.description = {**self.description, "lora": lora.lora_name}
        other._adapter = Adapter(digest, lora)
        return other

    @property
    def ended(self) -> Mapping[str, int]:
        """How many captures were `kept`, `failed` and `dropped`; see `Tickets`."""
        return self._tickets.ended

    @property
    def kv_bytes_per_token(self) -> int:
        """See `Capturer`."""
        return kv_bytes_per_token(self._llm.vllm_config)

    def capture(
        self,
        items: Iterable[CaptureItem],
        *,
        in_flight: int | None = None,
    ) -> Iterator[CaptureResult]:
        """See `Engine.capture`.

        Raises:
            EngineError: the model cannot be served with reuse, or the engine stopped.
        """
        if not self._gate.servable:
            raise EngineError(f"this model cannot be served with reuse: {self._gate.reason}")
        self.store.add_model(self.fingerprint, self.description)
        most = in_flight or self._in_flight
        return iter(Capturing(self._start, self._tickets, items, most))

    def in_passing(self, item: CaptureItem, *, behind_exact: bool) -> tuple[int, dict[str, Any]]:
        """A ticket for a request that prefills an item anyway, and the wish that it must carry.

        Args:
            behind_exact: also where what is reused is exact, and the beginning of the prompt.
        """
        ticket = self._tickets.draw()
        about = self._about(item, ticket)
        return ticket, {**about, "in_passing": True, "behind_exact": behind_exact}

    def forget(self, ticket: int) -> None:
        """Nobody waits for this capture."""
        self._tickets.drop(ticket)

    def wait_for(self, ticket: int) -> Captured | None:
        """What became of a capture in passing, once all ranks have written; None if they never say."""
        tickets, began = self._tickets, time.monotonic()
        try:
            # While others are written, it waits behind them.
            while time.monotonic() < max(began, tickets.heard_at) + WRITE_TIMEOUT_SECONDS:
                seen = tickets.news
                if (ranks := tickets.results(ticket)) is not None:
                    errors = [fields["error"] for fields in ranks if fields["error"]]
                    return Captured(
                        ticket,
                        bytes=sum(fields["bytes"] for fields in ranks),
                        error=errors[0] if errors else None,
                    )
                tickets.ask()
                tickets.wait(seen)
            return None
        finally:
            tickets.drop(ticket)

    def _start(self, item: CaptureItem, ticket: int) -> Future[None]:
        return self.submit(self._prefill(item, ticket))

    async def _prefill(self, item: CaptureItem, ticket: int) -> None:
        """Have the chunk computed; before it, where it has a reference, behind that context."""
        if item.reference is None:
            await self._run(item, item.context, self._about(item, ticket))
            return
        about = self._about(item, ticket)
        first = {**about, "context": len(item.reference), "role": "reference"}
        await self._run(item, item.reference, first)
        await self._run(item, item.context, {**about, "role": "compared"})

    async def _run(self, item: CaptureItem, context: TokenArray, about: dict[str, Any]) -> None:
        """One prefill, of which is captured what the engine is told.

        Raises:
            EngineError: vLLM's engine stopped.
            OptionError: vLLM does not take the prompt.
        """
        wishes = {"namespace": item.namespace, CAPTURE_KEY: about}
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={TRANSFER_FIELD: {PARAMS_KEY: wishes}},
        )
        prompt = [*context.tolist(), *item.tokens.tolist()]
        request_id = f"{CAPTURE_PREFIX}{next(self._ids)}"
        lora = None if self._adapter is None else self._adapter.request
        try:
            if lora is not None:
                await self._llm.load_adapter(lora)
            async for _ in self._llm.generate(
                {"prompt_token_ids": prompt}, params, request_id, lora_request=lora
            ):
                pass
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine stopped: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise OptionError(f"vLLM does not take this chunk: {error}") from error

    def _about(self, item: CaptureItem, ticket: int) -> dict[str, Any]:
        """What the scheduler must know of an item to have it captured."""
        return {
            "ticket": ticket,
            "id": item.id,
            "model": self.fingerprint,
            "adapter": None if self._adapter is None else self._adapter.digest,
            "kind": item.kind,
            "context": len(item.context),
        }

    def _take_captured(self) -> list[list[dict[str, Any]]]:
        """What each rank has written since the last call.

        Raises:
            EngineError: the engine was told to end, or stopped.
        """
        asked = self.submit(self._llm.collective_rpc("semkv_take_captures"))
        while not asked.done() and not self._llm.ended:
            wait([asked], TAKE_POLL_SECONDS)
        if not asked.done():
            asked.cancel()
            raise EngineError("the engine was told to end")
        try:
            taken: list[list[dict[str, Any]]] = asked.result()
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine stopped: {error}") from error
        return taken

    def submit(self, work: Any) -> Future[Any]:
        """What a coroutine gives, run in the engine's loop.

        Raises:
            EngineError: the engine is closed.
        """
        if not self._loop.is_running():
            work.close()
            raise EngineError("the engine is closed")
        # In no caller's name: whoever's request it is for, this is the engine's own work.
        return Context().run(asyncio.run_coroutine_threadsafe, work, self._loop)
