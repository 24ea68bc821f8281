"""Prompts with images: full prefill, and chunks that saw nothing but themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor


class ImageModel:
    """A transformers model that takes images, in float32 with eager attention."""

    def __init__(self, folder: Path) -> None:
        kind: Any = AutoModelForImageTextToText
        self._hf = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._processor: Any = AutoProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def logprobs(
        self, text: str, images: Sequence[Image.Image], alone: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """The next token's logprobs, [vocabulary].

        Args:
            text: with `<image>` for each of the images.
            alone: tokens of chunks, each once in the prompt, that attend to themselves alone.
        """
        inputs = self._processor(text=text, images=list(images), return_tensors="pt")
        tokens = inputs.input_ids[0].tolist()
        visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for chunk in alone:
            begin = _place_of(chunk, tokens)
            visible[begin : begin + len(chunk), :begin] = False
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

        def masked(
            _: Any, args: tuple[Any, ...], given: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, given | {"attention_mask": bias[None, None]}

        parts = self._hf.model
        language = parts.text_model if hasattr(parts, "text_model") else parts.language_model
        hook = language.register_forward_pre_hook(masked, with_kwargs=True)
        try:
            logits: Tensor = self._hf(**inputs).logits[0, -1]
        finally:
            hook.remove()
        return logits.log_softmax(-1)


def _place_of(chunk: Sequence[int], tokens: Sequence[int]) -> int:
    places = [
        begin
        for begin in range(len(tokens) - len(chunk) + 1)
        if list(tokens[begin : begin + len(chunk)]) == list(chunk)
    ]
    (place,) = places
    return place
