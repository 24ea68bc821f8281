"""vLLM's engine client: the one door through which requests enter, with the tiers around it.

Every request passes here, on every route and from every method. Its namespace is settled (`caller`), its
options are checked, and the namespace goes into vLLM's `cache_salt` and into the names of its images. So
no request finds cached blocks or images' features of another namespace. This holds for models that are
served without reuse, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from vllm import RequestOutput
from vllm.lora.request import LoRARequest
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.connector.adapter import NONE_SERVED, adapter_digest, adapter_model
from semkv_rag.connector.capture_results import CaptureResults
from semkv_rag.engine.caller import (
    CALLER,
    admitted,
    cache_salt,
    image_name,
    namespace_in,
    wishes_of,
)
from semkv_rag.engine.image_inputs import keep_images
from semkv_rag.engine.launch import WORKER
from semkv_rag.engine.looked_up import LooksUp
from semkv_rag.engine.mapping import completed
from semkv_rag.engine.outcome import Outcome, looking_on, plain_params
from semkv_rag.engine.recent import RecentRequests
from semkv_rag.engine.totals import Totals
from semkv_rag.engine.tracing import RequestTrace
from semkv_rag.engine.turns import Turns
from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore
from semkv_rag.token_map import TokenMap
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD

ENDING_S = 30.0
"""How long the engine's process may take to end. vLLM's 5 s are not enough on a busy machine, and what is
killed then leaks shared memory."""

DEAD_POLL_S = 1.0
"""How often it is looked whether the engine's process is there, while an answer of it is waited for."""
DYING = ("failed: cancelled", "Executor failed", "should not be called on follower node")
"""What vLLM 0.32 answers to all questions when one of its workers has died and it is about to end."""

CAPTURE_PREFIX = "semkv-capture-"
"""Ids of requests that are not a caller's: they capture chunks."""

CAPTURES_PRIORITY = 1_000_000
"""vLLM serves lower numbers first: nobody waits for a capture as for an answer."""


class ReportingLLM(AsyncLLM):
    """Admits requests, looks them up in the tiers, and tells their callers the report.

    Attributes:
        prompt_lookup: looks requests up in the prompt cache, or None.
        turns: what a namespace's callers may have in the engine at a time; None is no limit.
        store, fingerprint: where a token map's documents have their names, and the model there.
        totals: of the requests that ended, captures not counted.
        recent: keeps the requests that were answered last, or None.
        capture_results: through which workers tell what became of captures, or None; closed with this.
        plain_reason: in words, why our connector does not run; None where it does.
        ended: whether vLLM's engine was told to end; what is asked of it then is never answered.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.prompt_lookup: LooksUp | None = None
        self.turns: Turns | None = None
        self.store: KVStore | None = None
        self.fingerprint = ""
        self.totals = Totals()
        self.recent: RecentRequests | None = None
        self.capture_results: CaptureResults | None = None
        self.plain_reason: str | None = None
        self.ended = False
        self._of_namespace: Counter[str] = Counter()
        self._loaded: dict[int, str] = {}
        super().__init__(*args, **kwargs)
        keep_images(self.renderer)
        self._fair = self.vllm_config.scheduler_config.policy == "priority"
        self._traces = self.vllm_config.observability_config.otlp_traces_endpoint is not None
        self._has_connector = self.vllm_config.kv_transfer_config is not None
        self._hand_over = self.engine_core.add_request_async
        # vLLM has no hook there. Whatever makes a request for the engine's process, it ends here.
        self.engine_core.add_request_async = self._enter
        self._ask = self.engine_core.call_utility_async
        self.engine_core.call_utility_async = self._asked

    async def render(self, prompt: Any) -> Any:
        """A prompt as vLLM's OpenAI layer passes it on: tokens, with images as tensors.

        Args:
            prompt: text, tokens, or vLLM's dictionary of a prompt.
        """
        parsed = parse_model_prompt(self.model_config, prompt)
        (rendered,) = await self.renderer.render_cmpl_async([parsed])
        return rendered

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's.

        Raises:
            OptionError: an option of reuse cannot be used, or the request has no namespace.
        """
        caller = CALLER.get()
        sampling_params = sampling_params.clone()
        sampling_params.extra_args = admitted(sampling_params.extra_args, caller)
        namespace = namespace_in(sampling_params.extra_args)
        counted = not request_id.startswith(CAPTURE_PREFIX)
        turn: AbstractAsyncContextManager[None] = nullcontext()
        if self.turns is not None and caller is not None:
            turn = self.turns.taken(namespace, sampling_params.n)
        async with turn:
            async for output in self._generate(
                prompt, sampling_params, request_id, namespace, counted=counted, **options
            ):
                yield output

    async def _generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        namespace: str,
        *,
        counted: bool,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, of a request that was admitted."""
        caller = CALLER.get()
        if self._fair and (caller is not None or not counted):
            # Who has less under way comes first, whatever a client says of its requests itself.
            options["priority"] = self._of_namespace[namespace] if counted else CAPTURES_PRIORITY
        self._of_namespace[namespace] += 1
        wishes = sampling_params.extra_args[TRANSFER_FIELD][PARAMS_KEY]
        wants_map = wishes.get("token_map", False)
        recent = self.recent if counted else None
        if recent is not None:
            wishes["token_map"] = True
        trace = None
        if self._traces and counted:
            with looking_on():
                trace = RequestTrace(options.get("trace_headers"), self.model_config.model)
                options["trace_headers"] = trace.headers()
        outcome = Outcome(namespace, self.totals if counted else None, recent, trace)
        lora: LoRARequest | None = options.get("lora_request")
        lookup = self.prompt_lookup if counted else None
        try:
            if lookup is not None:
                outcome.looked_up = await lookup.begin(prompt, sampling_params, lora)
            if outcome.looked_up is not None:
                prompt, sampling_params = outcome.looked_up.prompt, outcome.looked_up.params
            async for output in super().generate(prompt, sampling_params, request_id, **options):
                if self.plain_reason is not None and output.finished:
                    output.kv_transfer_params = plain_params(output, self.plain_reason)
                outcome.take(output)
                if (params := output.kv_transfer_params) is not None:
                    tokens = output.prompt_token_ids or ()
                    await self._complete_map(params, tokens, namespace, lora, wanted=wants_map)
                    if caller is not None:
                        caller.report = params
                yield output
        except EngineGenerateError as error:
            if isinstance(error.__cause__, OptionError):  # of `_enter`
                raise error.__cause__ from None
            raise
        finally:
            outcome.end()
            if lookup is not None and outcome.looked_up is not None:
                lookup.end(
                    outcome.looked_up,
                    request_id,
                    outcome.report,
                    latency_s=outcome.seconds,
                    captured=outcome.captured,
                )
            self._of_namespace[namespace] -= 1
            if not self._of_namespace[namespace]:
                del self._of_namespace[namespace]

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, as vLLM does, but without stopping an engine of several ranks that cannot.

        When all ranks raise, vLLM 0.32 reads the first one's error only. It takes the next one's for the
        answer to its next call, and stops. So the ranks return what went wrong.

        Raises:
            ValueError: it cannot be loaded.
        """
        parallel = self.vllm_config.parallel_config
        if parallel.world_size == 1 or parallel.worker_cls != WORKER:
            return bool(await super().add_lora(lora_request))
        fields = {name: getattr(lora_request, name) for name in lora_request.__struct_fields__}
        told = await self.collective_rpc("semkv_add_lora", args=(fields,))
        if errors := [error for error in told if error is not None]:
            await self.remove_lora(lora_request.lora_int_id)  # some ranks may have it
            raise ValueError(errors[0])
        return True

    async def load_adapter(self, lora: LoRARequest) -> None:
        """Have an adapter loaded before a request names it: one that cannot be would stop the engine.

        Raises:
            OptionError: it cannot be loaded, or the engine serves none.
        """
        if self._loaded.get(lora.lora_int_id) == lora.lora_path and not lora.load_inplace:
            return
        if self.vllm_config.lora_config is None:
            raise OptionError(NONE_SERVED)
        try:
            await self.add_lora(lora)
        except EngineDeadError:
            raise
        except Exception as error:
            raise OptionError(
                f"vLLM does not load the LoRA adapter {lora.lora_name}: {error}"
            ) from error
        self._loaded[lora.lora_int_id] = lora.lora_path

    def _stored_under(self, lora: LoRARequest | None) -> str:
        """What the chunks of the model, or of it with an adapter, are stored under."""
        if lora is None:
            return self.fingerprint
        config = self.vllm_config.lora_config
        try:
            return adapter_model(self.fingerprint, adapter_digest(lora.lora_path), config)
        except OptionError:  # none are
            return self.fingerprint

    async def _complete_map(
        self,
        params: dict[str, Any],
        tokens: Sequence[int],
        namespace: str,
        lora: LoRARequest | None,
        *,
        wanted: bool,
    ) -> None:
        """Put texts and names into a report's token map, if it has one that is wanted."""
        report = params.get(PARAMS_KEY) or {}
        if (shown := report.get("token_map")) is None:
            return
        report["token_map"] = None
        if not wanted:
            return
        with looking_on():
            whole = await asyncio.to_thread(
                completed,
                TokenMap.from_mapping(shown),
                tokens,
                self.get_tokenizer(),
                self.store,
                self._stored_under(lora),
                namespace,
            )
            report["token_map"] = whole.to_mapping()

    def shutdown(self, timeout: float | None = None) -> None:
        """As vLLM's; what the tiers still have to write is written before.

        vLLM's server calls this from a thread when it is told to end. Not to be called from the loop's
        own thread while there are tiers that are not closed.
        """
        if self.prompt_lookup is not None:
            self.prompt_lookup.close()
        self.ended = True
        if self.capture_results is not None:
            self.capture_results.close()
        super().shutdown(timeout=ENDING_S if timeout is None else timeout)

    async def _asked(self, method: str, *args: Any) -> Any:
        """What the engine's process answers to a question that is no prompt.

        Raises:
            EngineDeadError: it died meanwhile. vLLM 0.32 fails its prompts then, and would wait for ever
                for the answer to anything else.
        """
        asked = asyncio.ensure_future(self._ask(method, *args))
        try:
            while not (await asyncio.wait([asked], timeout=DEAD_POLL_S))[0]:
                if self.errored:
                    raise EngineDeadError
            return asked.result()
        except Exception as error:
            if any(said in str(error) for said in DYING):
                raise EngineDeadError from error
            raise
        finally:
            asked.cancel()

    async def _enter(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine's process, in its namespace.

        Raises:
            OptionError: it has none, or holds what cannot be sent there.
        """
        try:
            await self._hand_over_in_namespace(request)
        except BaseException as error:
            # vLLM has noted it already, and would for ever.
            self.output_processor.abort_requests([request.request_id], internal=True)
            unsendable = isinstance(error, TypeError | ValueError | OverflowError)
            if unsendable and not isinstance(error, OptionError):
                raise OptionError(f"vLLM cannot take the request: {error}") from error
            raise

    async def _hand_over_in_namespace(self, request: EngineCoreRequest) -> None:
        namespace = self._namespace_of(request)
        request.cache_salt = cache_salt(namespace, request.cache_salt)
        if namespace != DEFAULT_NAMESPACE and request.mm_features:
            # Copies: the requests that an `n` above 1 makes share theirs.
            request.mm_features = [
                replace(feature, identifier=image_name(namespace, feature.identifier))
                for feature in request.mm_features
            ]
        await self._hand_over(request)

    def _namespace_of(self, request: EngineCoreRequest) -> str:
        params = request.sampling_params
        extra = (params.extra_args or {}) if params is not None else {}
        wishes = wishes_of(extra.get(TRANSFER_FIELD))
        if not self._has_connector:
            # vLLM warns of what nobody takes.
            extra.pop(TRANSFER_FIELD, None)
        caller = CALLER.get()
        namespace = wishes.get("namespace") if caller is None else caller.namespace
        if namespace is None:
            raise OptionError("the request has no namespace: it is not answered")
        return str(namespace)
