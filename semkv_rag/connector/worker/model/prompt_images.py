"""The images of a prompt that is blended: what they are embedded as, and where its tokens stand.

vLLM computes an image's features in the step that computes its rows. A blend computes them itself, with
the model's own encoder, or has them from the store. They live as long as the blend: vLLM's cache of
features is counted by its scheduler, which knows nothing of these.

In models with M-RoPE an image's tokens stand on a grid, and all behind it at positions other than their
numbers (Qwen2-VL, arXiv 2409.12191, section 2.1). The model says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from semkv_rag.connector.images.blended import BlendImage
from semkv_rag.connector.images.connector import save_features
from semkv_rag.connector.images.places import rows_of


class PromptImages:
    """Those of one blend.

    Args:
        model: takes images.
        images: in prompt order.
        tokens: the prompt's, up to the blend's end.
        grids: whether the model has M-RoPE.
    """

    def __init__(
        self,
        model: Any,
        images: Sequence[BlendImage],
        tokens: Sequence[int],
        device: torch.device,
        *,
        grids: bool,
    ) -> None:
        self._model, self._images, self._device = model, images, device
        self._rows = [
            torch.from_numpy(rows_of("", image.feature.mm_position).positions) for image in images
        ]
        self._features: list[Tensor | None] = [image.state for image in images]
        self._positions: Tensor | None = None
        if grids:
            features = [image.feature for image in images]
            told, _ = model.get_mrope_input_positions(list(tokens), features)
            self._positions = told.to(device)

    def positions(self, numbers: Tensor) -> Tensor:
        """What the model is told of some tokens' places.

        Args:
            numbers: of the tokens in the prompt, [tokens], int64.

        Returns:
            [tokens], or [rows, tokens] with M-RoPE, whose rows are three as a rule.
        """
        if self._positions is None:
            return numbers
        last = self._positions.shape[1] - 1  # behind it is text
        return self._positions[:, numbers.clamp(max=last)] + (numbers - last).clamp(min=0)

    def offset(self, begin: int, end: int) -> int:
        """The difference of positions of text from the tokens' numbers in the prompt.

        Args:
            begin: the first token of text without an image in it.
            end: the number behind its last one.

        Raises:
            ValueError: the model does not count that text token by token.
        """
        if self._positions is None:
            return 0
        offsets = self._positions[:, begin:end] - torch.arange(begin, end, device=self._device)
        offset = int(offsets[0, 0])
        if bool((offsets != offset).any()):
            raise ValueError(f"tokens {begin} to {end} of text stand at positions of another kind")
        return offset

    def embeddings(self, numbers: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What images bring for some tokens.

        Args:
            numbers: of the tokens in the prompt, [tokens], int64, ascending.

        Returns:
            Which of the tokens stand for a row of an image, bool [tokens], on the CPU, and these rows,
            [rows, width], image by image.
        """
        numbers = numbers.cpu()
        shows = torch.zeros(len(numbers), dtype=torch.bool)
        found = []
        for index, rows in enumerate(self._rows):
            wanted = torch.isin(rows, numbers)
            if wanted.any():
                shows |= torch.isin(numbers, rows)
                found.append(self._features_of(index)[wanted.to(self._device)])
        return shows, found

    def _features_of(self, index: int) -> Tensor:
        """An image's features, [rows, width], computed when first asked for."""
        features = self._features[index]
        if features is None:
            features = self._compute(index)
            save_features(self._images[index], features)
        if features.device != self._device:
            features = features.to(self._device)
        self._features[index] = features
        return features

    def _compute(self, index: int) -> Tensor:
        """Run the encoder on an image.

        Raises:
            ValueError: it gives another number of rows than the prompt has.
        """
        feature = self._images[index].feature
        ((_, _, arguments),) = group_and_batch_mm_kwargs(
            [(feature.modality, feature.data)], device=self._device
        )
        (features,) = self._model.embed_multimodal(**arguments)
        if len(features) != len(self._rows[index]):
            raise ValueError(
                f"an image has {len(features)} rows of features, and {len(self._rows[index])} tokens"
            )
        computed: Tensor = features
        return computed
