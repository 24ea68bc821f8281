"""One request to vLLM's engine client, as `Engine.generate` and its kin make it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.completion import Completion
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.report import ReuseReport
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, tokens, or vLLM's dictionary of a prompt, such as `{"prompt": …, "multi_modal_data": …}`."""


def sampling_params(sampling: Mapping[str, Any] | None, reuse: ReuseOptions) -> SamplingParams:
    """vLLM's sampling parameters with the reuse options in them.

    Raises:
        OptionError: vLLM does not take them.
    """
    fields = dict(sampling or {})
    extra = dict(fields.pop("extra_args", None) or {})
    extra[TRANSFER_FIELD] = {**extra.get(TRANSFER_FIELD, {}), PARAMS_KEY: reuse.to_mapping()}
    try:
        if isinstance(fields.get("structured_outputs"), Mapping):
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        return SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)
    except (TypeError, ValueError, VLLMClientError) as error:
        raise OptionError(f"vLLM does not take these sampling parameters: {error}") from error


async def parts(
    llm: ReportingLLM,
    prompt: Prompt,
    params: SamplingParams,
    request_id: str,
    lora: LoRARequest | None = None,
) -> AsyncIterator[Completion]:
    """The answer, part by part.

    Args:
        lora: the adapter that answers; None for the model alone.

    Raises:
        OptionError: vLLM does not take the request.
        EngineError: the engine stopped.
    """
    began = time.perf_counter()
    ttft_ms = 0.0
    given: Any = prompt
    if not isinstance(prompt, str | Mapping):
        given = {"prompt_token_ids": list(prompt)}
    try:
        rendered = await llm.render(given)
        if lora is not None:
            await llm.load_adapter(lora)
        async for output in llm.generate(rendered, params, request_id, lora_request=lora):
            latency_ms = (time.perf_counter() - began) * 1000
            ttft_ms = ttft_ms or latency_ms
            answer, prompt_tokens = output.outputs[0], len(output.prompt_token_ids or ())
            report = (output.kv_transfer_params or {}).get(PARAMS_KEY)
            yield Completion(
                text=answer.text,
                token_ids=tuple(answer.token_ids),
                logprobs=_logprobs(answer.logprobs),
                finish_reason=answer.finish_reason,
                prompt_tokens=prompt_tokens,
                report=(
                    ReuseReport(kv_cache="skip", prompt_tokens=prompt_tokens)
                    if report is None
                    else ReuseReport.from_mapping(report)
                ),
                ttft_ms=ttft_ms,
                latency_ms=latency_ms,
            )
    except EngineDeadError as error:
        raise EngineError(f"vLLM's engine stopped: {error}") from error
    except (ValueError, VLLMClientError) as error:
        raise OptionError(f"vLLM does not take this request: {error}") from error


def _logprobs(given: Any) -> tuple[dict[int, float], ...] | None:
    if given is None:
        return None
    return tuple({token: one.logprob for token, one in place.items()} for place in given)
