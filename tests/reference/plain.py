"""Full prefill: what a prompt's next token is when nothing is reused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Cache


class PlainModel:
    """A transformers model in float32 with eager attention."""

    def __init__(self, folder: str | Path) -> None:
        sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.hf = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """The next token's logprobs behind `tokens`, [vocabulary]."""
        return self.hf(input_ids=torch.tensor([list(tokens)])).logits[0, -1].log_softmax(-1)

    def greedy(self, tokens: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """The `count` tokens that follow, and the logprobs they were taken from.

        Every token is a full prefill of its own. The end-of-sequence token stops nothing.

        Returns:
            the tokens, and logprobs [count, vocabulary].
        """
        taken: list[int] = []
        steps: list[Tensor] = []
        for _ in range(count):
            steps.append(self.logprobs([*tokens, *taken]))
            taken.append(int(steps[-1].argmax()))
        return taken, torch.stack(steps)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        positions: Tensor,
        visible: Tensor,
        cache: Cache | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        """One pass of the model over `tokens`, with everything about attention said outright.

        Args:
            positions: where each token stands, [tokens].
            visible: the keys each token sees, bool [tokens, keys]; keys are what `cache.update`
                returns, or the tokens' own without a cache. In layers with a sliding window it sees
                those of them that are in its window.
            key_positions: where each key stands, [keys]; the tokens' own positions when left out.

        Returns:
            each token's logprobs of what follows it, [tokens, vocabulary].
        """
        output = self._run(tokens, positions, visible, cache, key_positions)
        return output.logits[0].log_softmax(-1)

    @torch.inference_mode()
    def weights(
        self, tokens: Sequence[int], positions: Tensor, visible: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """The attention weights of the same pass, [layers, heads, tokens, keys]."""
        output = self._run(tokens, positions, visible, cache, output_attentions=True)
        return torch.cat(output.attentions)

    def _run(
        self,
        tokens: Sequence[int],
        positions: Tensor,
        visible: Tensor,
        cache: Cache | None,
        key_positions: Tensor | None = None,
        **options: Any,
    ) -> Any:
        return self.hf(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=positions[None],
            attention_mask=self._masks(
                visible, positions, positions if key_positions is None else key_positions
            ),
            past_key_values=cache,
            use_cache=cache is not None,
            **options,
        )

    def _masks(self, visible: Tensor, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """What is added to logits, [1, 1, tokens, keys]; by kind of layer, where there are several."""
        config = self.hf.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        near = visible if window is None else visible & (keys > queries[:, None] - window)
        full, sliding = (
            torch.zeros(one.shape).masked_fill(~one, torch.finfo(torch.float32).min)[None, None]
            for one in (visible, near)
        )
        kinds = set(getattr(config, "layer_types", None) or ())
        if "sliding_attention" in kinds:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding if not kinds else full


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """What each query sees: keys at its own position and before, bool [queries, keys]."""
    return keys[None, :] <= queries[:, None]
