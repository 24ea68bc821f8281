"""A model without starting it: its fingerprint, its limits, and prompts in its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt

from semkv_rag.closing import Closing
from semkv_rag.connector.adapter import adapter_digest, adapter_model
from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.engine.launch import engine_arguments, kv_bytes_per_token, resolve
from semkv_rag.errors import OptionError
from semkv_rag.reuse import TokenArray, token_array
from semkv_rag.store.codecs import PLAIN


class OfflineModel(Closing):
    """A model's renderer, which is vLLM's own: prompts become the tokens that a request would send.

    Args:
        model: a folder or a hub name, as for `Engine`.
        codec: as for `Engine`.
        lora: the folder of a LoRA adapter, of which the fingerprint is then; needs `enable_lora=True`.
        engine_args: as for `Engine`.

    Attributes:
        fingerprint: that the engine would have.
        max_model_len: the context window, in tokens.
        kv_bytes_per_token: what a token's KV takes in the store.

    Raises:
        OptionError: an engine argument is unknown, or the folder holds no adapter.
        EngineError: vLLM cannot load the model, or its files are not on this machine.
    """

    def __init__(
        self,
        model: str,
        *,
        codec: str = PLAIN,
        lora: str | Path | None = None,
        **engine_args: Any,
    ) -> None:
        config, _ = resolve(engine_arguments(model, engine_args), None)
        self.fingerprint = config_fingerprint(config)
        if lora is not None:
            digest = adapter_digest(str(lora))
            self.fingerprint = adapter_model(self.fingerprint, digest, config.lora_config)
        self.max_model_len: int = config.model_config.max_model_len
        self.kv_bytes_per_token = kv_bytes_per_token(config, codec)
        self._config = config.model_config
        self._renderer = renderer_from_config(config)

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._renderer.get_tokenizer()

    def render(self, prompt: str | Sequence[Mapping[str, Any]]) -> tuple[str, TokenArray]:
        """A prompt's text, by which the tiers know it, and its tokens, [tokens].

        Args:
            prompt: text, or messages for the model's chat template.

        Raises:
            OptionError: the messages cannot be put through the template, or there is none.
        """
        if isinstance(prompt, str):
            given = parse_model_prompt(self._config, prompt)
            (rendered,) = self._renderer.render_cmpl([given], _of_any_length(self._renderer))
        else:
            try:
                request = ChatCompletionRequest.model_validate({"messages": prompt})
                params = request.build_chat_params(None, "auto")
                _, (rendered,) = self._renderer.render_chat(
                    [request.messages], params, _of_any_length(self._renderer, chat=True)
                )
            except (ValueError, TypeError) as error:
                raise OptionError(f"vLLM does not take these messages: {error}") from error
        tokens = rendered["prompt_token_ids"]
        # As requests are looked up.
        text = rendered.get("prompt") or self._renderer.get_tokenizer().decode(tokens)
        return text, token_array(tokens)

    def close(self) -> None:
        """End the renderer's threads."""
        self._renderer.shutdown()


def _of_any_length(renderer: Any, *, chat: bool = False) -> Any:
    """How prompts are made tokens, those that are longer than the model takes among them."""
    usual = renderer.default_chat_tok_params if chat else renderer.default_cmpl_tok_params
    return replace(usual, max_total_tokens=None)
