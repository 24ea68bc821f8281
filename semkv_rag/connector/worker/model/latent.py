"""Layers with multi-head latent attention (MLA), whose cache holds one entry for all heads.

A token's entry has two parts: the latent, from which each head makes its own keys and values, and the
part of the keys that turns with the position, which all heads share. Blends and files treat the second
part as K and the first as V, both of one head. So K moves and V does not, as in every other layer.

vLLM computes MLA in two ways. In a prefill it makes keys and values of the latents. In a decode it takes
the query into the space of the latents ("absorbed") and attends to the cache as it is. The tokens of a
blend go the second way, each as a sequence of its own, for three reasons: every backend can do that at
any position; no keys and values have to be made of the reused tokens' latents; and the KV tap sees the
queries that are multiplied with what is stored.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBaseImpl,
    MLACommonDecodeMetadata,
)

from semkv_rag.connector.worker.model.layer import Asked, Layer, See, Update
from semkv_rag.connector.worker.model.replaced import Forward, replaced


@dataclass(eq=False)
class LatentLayer(Layer):
    """A layer whose cache holds latents. `attention` is vLLM's `MLAAttention`."""

    asks_values: ClassVar[bool] = True
    by_token: ClassVar[bool] = True

    @property
    def sinks(self) -> Tensor | None:
        return None

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """`(1, dim)` of the part that turns, and of the latent; the same on all ranks."""
        attention = self.attention
        return (1, int(attention.qk_rope_head_dim)), (1, int(attention.kv_lora_rank))

    def tapped(self, update: Update, see: See) -> Update:
        def tapped(
            latent: Tensor, turned: Tensor, cache: Tensor, slots: Tensor, *rest: Any
        ) -> None:
            see(turned, latent, slots.flatten())
            update(latent, turned, cache, slots, *rest)

        return tapped

    def write(self, update: Update, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        attention = self.attention
        kept = attention.kv_cache_dtype, attention._k_scale
        update(values.flatten(1), keys, attention.kv_cache, slots, *kept)

    def asking(self, asked: Asked) -> AbstractContextManager[None]:
        impl = self.attention.impl

        def wrap(forward: Forward) -> Forward:
            def before(query: Any, *args: Any, **kwargs: Any) -> Any:
                asked(torch.cat(query, -1) if isinstance(query, tuple) else query, impl)
                return forward(query, *args, **kwargs)

            return before

        return replaced(impl, wrap, "forward_mqa")

    def attended(self, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat((values, keys), -1)

    @property
    def query_dim(self) -> int:
        return int(self.attention.qk_head_dim)

    def alike(self, queries: Tensor) -> Tensor:
        return queries[..., self.attention.qk_nope_head_dim :].mean(1, keepdim=True)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention = self.attention
        shape = torch.Size((len(queries), attention.num_heads * attention.v_head_dim))
        output: Tensor = attention(queries, values.flatten(1), keys, output_shape=shape)
        return output

    def of_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        attention = self.attention
        weight = getattr(attention.kv_b_proj, "weight", None)
        if weight is not None and not weight.numel():  # repacked for AMX
            raise NotImplementedError("what makes K and V of latents is not at hand")
        made: Tensor = attention.kv_b_proj(values.flatten(1))[0]
        made = made.view(len(values), attention.num_heads, -1)
        still = int(attention.qk_nope_head_dim)
        turning = keys.expand(-1, attention.num_heads, -1)
        return torch.cat((made[..., :still], turning), -1), made[..., still:]


def latent_obstacle(attention: Any) -> str | None:
    """What keeps the cache of an MLA layer from being reused, in words, or None."""
    if attention.use_sparse or attention.indexer is not None:
        return "attends to the tokens that an indexer picks (sparse MLA)"
    if attention.sliding_window is not None:
        return "keeps latents of a sliding window only"
    if attention.kv_cache_dtype != "auto" and attention.kv_cache.dtype.itemsize == 1:
        return f"keeps its latents in 8 bits (kv_cache_dtype {attention.kv_cache_dtype})"
    return None


def attend_to_context(layer: LatentLayer) -> None:
    """Let a prompt's tokens attend to what is in the cache before them, where vLLM cannot.

    On CPUs without AMX vLLM prefills MLA in one piece, from the first token on: it has no kernel that
    reads a context, and turns chunked prefill and prefix caching off. Behind a blend there is one. Such
    tokens are computed as decoded ones are there.
    """
    attention, impl = layer.attention, layer.attention.impl
    at_once: Any = MLACommonBaseImpl.forward_mha
    if attention.kv_cache.device.type != "cpu" or type(impl).forward_mha is not at_once:
        return
    whole = impl.forward_mha

    def forward_mha(
        query: Tensor,
        latent: Tensor,
        turned: Tensor,
        cache: Tensor,
        metadata: Any,
        scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        prefill = metadata.prefill
        if prefill.chunked_context is None:
            whole(query, latent, turned, cache, metadata, scale, output, output_scale)
            return
        starts = prefill.query_start_loc.long()
        owners = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
        ahead = prefill.chunked_context.context_lens - starts[:-1]
        decode = MLACommonDecodeMetadata(
            block_table=prefill.block_table[owners],
            seq_lens=torch.arange(1, len(query) + 1) + ahead[owners],
            dcp_tot_seq_lens=None,
        )
        still = int(impl.qk_nope_head_dim)
        plain, turning = query[..., :still], query[..., still:]
        absorbed = torch.bmm(plain.transpose(0, 1), attention.W_UK_T).transpose(0, 1)
        found, _ = impl.forward_mqa(
            (absorbed, turning), cache, replace(metadata, decode=decode), attention
        )
        attention._v_up_proj(found, out=output)

    impl.forward_mha = forward_mha
