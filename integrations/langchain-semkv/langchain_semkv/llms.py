"""`SemKVLLM`: LangChain's text-in, text-out model over an engine in this process, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue

from langchain_semkv.answers import PROVIDER, metadata, usage
from langchain_semkv.base import SemKVModel
from semkv_rag.llm import Part

# vLLM batches what comes at once; more waiting threads than this add nothing.
_AT_ONCE = 64


class SemKVLLM(BaseLLM, SemKVModel[str]):
    """A model in vLLM, for prompts that are text, with the KV of stored chunks out of a store.

    The prompt goes to the model as it is, without a chat template. In an answer's `generation_info`,
    `semkv` says what was reused (the fields of `semkv_rag.report.ReuseReport`), and `usage_metadata`
    how many of the prompt's tokens were `cache_read`. Use `generate` or callbacks to see them:
    `invoke` returns the text alone.

    Options and errors are those of `ChatSemKV`.

    Example:
        ```python
        llm = SemKVLLM(model="Qwen/Qwen3-8B", store="kv-store")
        llm.invoke(manual + "\\n\\nQuestion: How is the pump started?\\nAnswer:")
        ```
    """

    @property
    def _llm_type(self) -> str:
        return "semkv"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """For traces: without asking the engine or the server."""
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = kwargs.get("model") or self.model or self.base_url or ""
        if ends := self.stop if stop is None else stop:
            params["ls_stop"] = ends
        return params

    def prefix_of(self, prompt: PromptValue, marker: str) -> str:
        return self.backend().prefix_of(prompt.to_string(), marker)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        backend, fields, reuse = self._call(stop, kwargs)
        if len(prompts) == 1:
            return _result([backend.answer(prompts[0], fields, reuse)])
        with ThreadPoolExecutor(min(_AT_ONCE, len(prompts) or 1)) as pool:
            return _result(list(pool.map(lambda one: backend.answer(one, fields, reuse), prompts)))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        backend, fields, reuse = await asyncio.to_thread(self._call, stop, kwargs)
        answers = (backend.aanswer(prompt, fields, reuse) for prompt in prompts)
        return _result(await asyncio.gather(*answers))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        backend, fields, reuse = self._call(stop, kwargs)
        for part in backend.stream(prompt, fields, reuse):
            chunk = GenerationChunk(text=part.text, generation_info=_info(part))
            if run_manager is not None:
                run_manager.on_llm_new_token(part.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        backend, fields, reuse = await asyncio.to_thread(self._call, stop, kwargs)
        async for part in await backend.astream(prompt, fields, reuse):
            chunk = GenerationChunk(text=part.text, generation_info=_info(part))
            if run_manager is not None:
                await run_manager.on_llm_new_token(part.text, chunk=chunk)
            yield chunk


def _info(part: Part) -> dict[str, Any] | None:
    counted = usage(part)
    info = metadata(part)
    if counted is not None:
        info["usage_metadata"] = counted
    return info or None


def _result(parts: Sequence[Part]) -> LLMResult:
    generations = [[Generation(text=part.text, generation_info=_info(part))] for part in parts]
    counts = [count for part in parts if (count := usage(part)) is not None]
    output: dict[str, Any] = {
        "token_usage": {
            "prompt_tokens": sum(count["input_tokens"] for count in counts),
            "completion_tokens": sum(count["output_tokens"] for count in counts),
            "total_tokens": sum(count["total_tokens"] for count in counts),
        }
    }
    if parts and parts[0].raw is not None:
        output["model_name"] = parts[0].raw.get("model")
    return LLMResult(generations=generations, llm_output=output)
