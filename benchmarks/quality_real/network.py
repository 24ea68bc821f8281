"""A real model in plain PyTorch whose KV cache is open: any rows can be computed over any stored KV.

Everything that a blend leaves stale or computes again is done here as the engine does it, row by row, so
that a rule's effect is measured without vLLM's kernels between it and the figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

from semkv_rag.blend import squared_attention


@dataclass
class Cache:
    """KV of a prompt. Keys are rotated to their places.

    Attributes:
        keys, values: [layers, kv_heads, tokens, head_dim].
    """

    keys: Tensor
    values: Tensor

    def clone(self) -> Cache:
        return Cache(self.keys.clone(), self.values.clone())

    def joined(self, other: Cache) -> Cache:
        """This and what stands behind it."""
        return Cache(
            torch.cat((self.keys, other.keys), 2), torch.cat((self.values, other.values), 2)
        )


class Network:
    """A model of Llama's, Qwen2's or Qwen3's kind, out of a Hugging Face folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name = folder.name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.requires_grad_(False)
        self._decoder = self._model.model
        config = self._model.config
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = self._decoder.layers[0].self_attn.head_dim
        self.dtype = dtype
        self.rows = 0  # tokens times layers that were computed
        ends = self._model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])

    def cache(self, tokens: int) -> Cache:
        """An empty cache of `tokens` places."""
        shape = (self.layers, self.kv_heads, tokens, self.head_dim)
        return Cache(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """[tokens, hidden]."""
        return self._decoder.embed_tokens(torch.as_tensor(tokens))

    def run(
        self,
        hidden: Tensor,
        places: Tensor,
        cache: Cache,
        *,
        first: int = 0,
        last: int | None = None,
        seen: list[Tensor] | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Take rows through layers `first` to `last` over the cache, each seeing what stands before it.

        Args:
            hidden: [rows, hidden], at the entry of layer `first`.
            places: [rows], int64, ascending: where in the cache they stand.
            cache: gets the rows' K and V.
            seen: gets, layer by layer, the rows' squared attention to each place, [tokens].
            counted: [tokens], bool: the places that attention is told of, a softmax over them alone.

        Returns:
            [rows, hidden], at the entry of layer `last`, or after the final norm.
        """
        end = self.layers if last is None else last
        self.rows += len(places) * (end - first)
        length = int(places[-1]) + 1
        mask = torch.arange(length)[None] <= places[:, None]
        whole = len(places) == length
        for number in range(first, end):
            layer = self._decoder.layers[number]
            query, key, value = self._projected(number, hidden, places)
            cache.keys[number][:, places] = key
            cache.values[number][:, places] = value
            keys, values = cache.keys[number][:, :length], cache.values[number][:, :length]
            mixed = scaled_dot_product_attention(
                query[None],
                keys[None],
                values[None],
                attn_mask=None if whole else mask,
                is_causal=whole,
                enable_gqa=True,
            )[0]
            if seen is not None:
                seen.append(
                    squared_attention(
                        query.transpose(0, 1),
                        keys.transpose(0, 1),
                        mask if counted is None else mask & counted[:length],
                        scale=self.head_dim**-0.5,
                    )
                )
            hidden = hidden + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self._decoder.norm(hidden) if end == self.layers else hidden

    def step(self, tokens: Sequence[int], places: Sequence[int], caches: Sequence[Cache]) -> Tensor:
        """The next token's logits, [caches, words], of one more token in each of several caches."""
        at = torch.tensor(places)
        hidden = self.embed(tokens)
        for number in range(self.layers):
            layer = self._decoder.layers[number]
            query, key, value = self._projected(number, hidden, at)
            mixed = []
            for row, (place, cache) in enumerate(zip(places, caches, strict=True)):
                cache.keys[number][:, place], cache.values[number][:, place] = (
                    key[:, row],
                    value[:, row],
                )
                one = scaled_dot_product_attention(
                    query[None, :, row : row + 1],
                    cache.keys[number][None, :, : place + 1],
                    cache.values[number][None, :, : place + 1],
                    enable_gqa=True,
                )
                mixed.append(one[0, :, 0].flatten())
            hidden = hidden + layer.self_attn.o_proj(torch.stack(mixed))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.logits(self._decoder.norm(hidden))

    def keys_values(self, number: int, hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """What layer `number` makes of rows at its entry: keys and values, [kv_heads, rows, head_dim]."""
        _, key, value = self._projected(number, hidden, places)
        return key, value

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, words], float32, of rows behind the final norm."""
        return self._model.lm_head(hidden).float()

    def prefill(self, tokens: Sequence[int], behind: Cache | None = None) -> Cache:
        """The KV of a text behind another's, with it; the first token of all at position 0."""
        before = 0 if behind is None else behind.keys.shape[2]
        cache = self.cache(before + len(tokens))
        if behind is not None:
            cache.keys[:, :, :before], cache.values[:, :, :before] = behind.keys, behind.values
        places = torch.arange(before, before + len(tokens))
        self.run(self.embed(tokens), places, cache)
        return cache

    def moved(self, keys: Tensor, shift: int) -> Tensor:
        """Rotated keys, `shift` positions further."""
        cos, sin = self._decoder.rotary_emb(keys[:1, 0, :1].float(), torch.tensor([[shift]]))
        return _rotated(keys.float(), cos[0], sin[0]).to(keys.dtype)

    def _projected(
        self, number: int, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        layer = self._decoder.layers[number]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        rows = len(normed)
        query = attention.q_proj(normed).view(rows, -1, self.head_dim)
        key = attention.k_proj(normed).view(rows, -1, self.head_dim)
        value = attention.v_proj(normed).view(rows, -1, self.head_dim)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        cos, sin = self._decoder.rotary_emb(hidden[None].float(), positions[None])
        cos, sin = cos[0][:, None], sin[0][:, None]
        query = _rotated(query.float(), cos, sin).to(hidden.dtype)
        key = _rotated(key.float(), cos, sin).to(hidden.dtype)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin
