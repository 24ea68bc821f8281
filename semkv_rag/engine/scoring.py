"""Log-probabilities along a given answer: what a model would have said in each token's place.

The answer is sent as the prompt's end, with vLLM's `prompt_logprobs`, and the blend is planned as though
the prompt stood there without it: the KV before the answer is that of a request that generates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers.chat_utils import load_chat_template
from vllm.v1.engine.exceptions import EngineDeadError

from semkv_rag.engine.client import ReportingLLM
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.wire import ANSWER_TOKENS_KEY, PARAMS_KEY, TRANSFER_FIELD

Scored = dict[int, float]
"""Log-probabilities of one place, by token id."""


async def score(
    llm: ReportingLLM,
    request_id: str,
    prompt: Sequence[int],
    answer: Sequence[int],
    top: int,
    wishes: Mapping[str, Any],
    lora: LoRARequest | None,
) -> list[Scored | None]:
    """See `Engine.score`.

    Args:
        wishes: our `kv_transfer_params`.
        lora: the adapter that answers; None for the model alone.
    """
    params = {**wishes[PARAMS_KEY], ANSWER_TOKENS_KEY: len(answer)}
    extra = {TRANSFER_FIELD: {PARAMS_KEY: params}}
    try:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top,
            # Without saying so vLLM would read no KV at all for such a request, and so blend none.
            skip_reading_prefix_cache=False,
            # Places in vLLM's prefix cache have no logits: what stands there are no token ids.
            detokenize=False,
            extra_args=extra,
        )
        given = await llm.render({"prompt_token_ids": [*prompt, *answer]})
        places: Sequence[Mapping[int, Any] | None] = ()
        cached = 0
        if lora is not None:
            await llm.load_adapter(lora)
        async for output in llm.generate(given, sampling, request_id, lora_request=lora):
            places = output.prompt_logprobs or places
            cached = output.num_cached_tokens or cached
    except EngineDeadError as error:
        raise EngineError(f"vLLM's engine stopped: {error}") from error
    except (ValueError, VLLMClientError) as error:
        raise OptionError(f"vLLM does not take this request: {error}") from error
    # The first entry stands for the first token, before which there is nothing. Counted from the end:
    # one of vLLM's model runners leaves out those it did not compute.
    behind = list(places[1:])[-len(answer) :]
    found: list[Scored | None] = [None] * (len(answer) - len(behind))
    found += [{token: entry.logprob for token, entry in (at or {}).items()} for at in behind]
    # The logits of a place are the output of the token before it, which has to be computed.
    known = cached + 1 - len(prompt)
    return [None if place < known else at for place, at in enumerate(found)]


async def rendered(
    llm: ReportingLLM, prompt: str | Sequence[Mapping[str, Any]], chat_template: str | None
) -> Mapping[str, Any]:
    """A prompt as the model takes it: `prompt_token_ids` and, where vLLM had a text of it, `prompt`."""
    try:
        if isinstance(prompt, str):
            return dict(await llm.render(prompt))
        request = ChatCompletionRequest.model_validate({"messages": prompt})
        params = request.build_chat_params(load_chat_template(chat_template), "auto")
        params = params.with_defaults({"tokenize": False})  # the text is kept, and tokenized then
        renderer = llm.renderer
        _, (made,) = await renderer.render_chat_async(
            [request.messages], params, renderer.default_chat_tok_params
        )
        return dict(made)
    except (ValueError, TypeError, VLLMClientError) as error:
        raise OptionError(f"vLLM does not take this prompt: {error}") from error
