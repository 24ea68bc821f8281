"""What an engine stores ahead of requests: chunks, and whole prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm.lora.request import LoRARequest

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.messages import GateReport
from semkv_rag.corpus.capture import CaptureItem, Capturer, CaptureResult
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.errors import EngineError
from semkv_rag.report import ReuseReport


class Storing:
    """The part of `Engine` that computes what is stored.

    Attributes:
        reuse: the options of requests that bring none.
        gate: whether this model is served with reuse, and if not, why.
    """

    reuse: ReuseOptions
    gate: GateReport
    _llm: ReportingLLM | None
    _capturer: LLMCapturer | None

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
        if self._capturer is None:
            raise EngineError("the engine was started without a store: pass store=…")
        return self._capturer.capture(items, in_flight=in_flight)

    def with_adapter(self, lora_request: LoRARequest) -> Capturer:
        """What stores chunks of the model with a LoRA adapter, for `precompute` and its kin.

        Args:
            lora_request: as for `Engine.generate`.

        Raises:
            EngineError: the engine has no store.
            OptionError: the engine serves no adapters, or there is none in the folder.
        """
        if self._capturer is None:
            raise EngineError("the engine was started without a store: pass store=…")
        return self._capturer.with_adapter(lora_request)

    def observe(
        self,
        prompt: str | Sequence[int],
        *,
        namespace: str | None = None,
        source_version: str = "",
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Prefill a prompt, store its KV and make it a donor of the tiers, ahead of any request.

        Args:
            prompt: text or tokens; a prompt with images is stored when it is answered.
            source_version: see `ReuseOptions`.
            lora_request: as for `Engine.generate`.

        Raises:
            OptionError: the adapter cannot be used.
            EngineError: the engine was started without tiers, its model cannot be served with reuse,
                or the prompt could not be computed or written.
            StoreError: the store cannot be written.
        """
        where = self.reuse.namespace if namespace is None else namespace
        self._prompt_lookup().observe(prompt, where, source_version, lora_request)

    def record(
        self, report: ReuseReport, *, correct: bool, lora_request: LoRARequest | None = None
    ) -> bool:
        """Tell the guard whether the answer of the donor that a request explored would have done.

        That is how `reuse="substitute"` learns from which similarity on a stored prompt may be
        answered in a new one's place.

        Args:
            report: of the request's answer.
            lora_request: of the request.

        Returns:
            False when the request explored nothing, or the donor is gone.

        Raises:
            OptionError: the adapter cannot be used.
            EngineError: the engine was started without tiers, or its model cannot be served.
            StoreError: the store cannot be written.
        """
        explored = report.explored
        if explored is None:
            return False
        cascade, _ = self._prompt_lookup().prompts_of(lora_request)
        return cascade.record(explored, correct=correct)

    def _prompt_lookup(self) -> PromptLookup:
        lookup = None if self._llm is None else self._llm.prompt_lookup
        if not isinstance(lookup, PromptLookup):
            raise EngineError(
                "no prompt cache: pass store=… and prompt_cache=PromptCacheOptions()"
                if self.gate.servable
                else f"this model cannot be served with reuse: {self.gate.reason}"
            )
        return lookup
