"""The model called on slices of requests, of tokens of our choice, behind a step's own forward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors

from semkv_rag.connector.messages import BlendTask
from semkv_rag.connector.worker.model.adapters import Adapters
from semkv_rag.connector.worker.model.eager_kernels import EagerKernels
from semkv_rag.connector.worker.model.kernel_loading import KernelLoading
from semkv_rag.connector.worker.model.kv_tap import KVTap
from semkv_rag.connector.worker.model.layer import Layer
from semkv_rag.connector.worker.model.paged import PagedKV
from semkv_rag.connector.worker.model.prompt_images import PromptImages
from semkv_rag.connector.worker.model.row_attention import RowAttention
from semkv_rag.connector.worker.model.scattered import ScatteredAttention
from semkv_rag.connector.worker.model.slice import Slice
from semkv_rag.connector.worker.ranks import Ranks

Attention: TypeAlias = ScatteredAttention | RowAttention


class _Filled(Exception):
    """Stops a forward: nobody reads what else it would compute."""


@dataclass(frozen=True, eq=False)
class _Shown:
    """What images bring for the tokens of some slices.

    Attributes:
        tokens: which of them stand for a row of an image, bool [tokens], on the CPU.
        features: of these rows, [rows, width], image by image.
    """

    tokens: Tensor
    features: list[Tensor]

    def nothing(self) -> _Shown:
        """The same of images with nothing in them."""
        return _Shown(self.tokens, [torch.zeros_like(rows) for rows in self.features])


class SlicedModel:
    """A loaded model with its paged cache.

    Args:
        model: the model, without what the runner wraps it in.
        layers: its decoder layers, those of this rank.
        ranks: this one among those that compute the model.
        adapters: None where the engine serves none.

    Attributes:
        attention: of what is computed here.
        loading: writes stored KV in one go; None where decoding, moving and vLLM's write do.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tap: KVTap,
        paged: PagedKV,
        attention: Attention,
        config: VllmConfig,
        ranks: Ranks,
        adapters: Adapters | None = None,
    ) -> None:
        self._model, self.config, self.ranks, self.adapters = model, config, ranks, adapters
        self._kernels = EagerKernels(model, config)
        self.layers, self.tap, self.paged, self.attention = layers, tap, paged, attention
        self.loading: KernelLoading | None = None

    def forward(self, slices: Sequence[Slice], *, rotary_shift: int = 0) -> Tensor | None:
        """The hidden states of the slices' tokens, one slice behind the other; their KV is written.

        Returns:
            None where a later stage of the pipeline has them.

        Args:
            rotary_shift: what the model is told to add to the positions; the cache and the mask
                stay where they are. The gate sees by it how keys move.
        """
        with self.attention.computing():
            return self._run(slices, rotary_shift)

    def fill(self, slices: Sequence[Slice], until: int | None = None) -> None:
        """As `forward`, but stopped in a layer once its KV is written, or its queries are asked for:
        nobody reads more.

        Args:
            until: that layer of the model; the last one when left out. Stages behind it have nothing to
                do, and those before it hand on what they computed.
        """
        end = (self.ranks.layers - 1 if until is None else until) - self.ranks.first_layer
        asks = any(one.watcher.asks for one in slices)
        ends = list(itertools.accumulate(len(one.positions) for one in slices))
        parts = [
            (one, slice(stop - len(one.positions), stop))
            for one, stop in zip(slices, ends, strict=True)
        ]

        def see(index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            keys, values = self.as_heads(index, keys, values)
            for one, rows in parts:
                one.watcher.see(index, one.positions, keys[rows], values[rows])
            if index == end and not asks:
                self.tap.write(index, keys, values, slots)
                raise _Filled

        def ask(index: int, queries: Tensor, attention: Any) -> None:
            for one, rows in parts:
                one.watcher.ask(index, queries[rows], attention)
            if index == end:
                raise _Filled

        with contextlib.ExitStack() as watching:
            watching.enter_context(self.attention.computing())
            watching.enter_context(self.tap.handling(see))
            if asks:
                watching.enter_context(self.tap.asking(ask))
            with contextlib.suppress(_Filled):
                if end >= 0:
                    self._run(slices)
        for one in slices:
            one.watcher.end()

    def images_of(self, task: BlendTask) -> PromptImages | None:
        """The images that a blend computes, or None."""
        if not task.images:
            return None
        grids = self.config.model_config.uses_mrope
        return PromptImages(self._model, task.images, task.tokens, self.paged.device, grids=grids)

    def as_heads(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of layer `index` as [tokens, kv_heads, head_dim]."""
        heads = self.layers[index].kv_heads
        return keys.view(len(keys), heads, -1), values.view(len(values), heads, -1)

    def _run(self, slices: Sequence[Slice], rotary_shift: int = 0) -> Tensor | None:
        tokens = [token for one in slices for token in one.tokens]
        metadata, slots = self.attention.metadata(slices)
        states = self.ranks.receive()
        ids = torch.tensor(tokens, device=self.paged.device)
        given: dict[str, Any] = {"input_ids": ids}
        shown: _Shown | None = None
        if states is None:
            shown = _images_in(slices)
        else:
            given["intermediate_tensors"] = states
        if shown is not None:
            given["inputs_embeds"] = self._embed(ids, shown)
            if not getattr(self._model, "requires_raw_input_tokens", False):
                given["input_ids"] = None
        with (
            self._adapted(slices),
            self._kernels.used(),
            set_forward_context(
                metadata,
                self.config,
                num_tokens=len(tokens),
                slot_mapping=slots,
                # A compiled model gave other KV where a forward is stopped: the gate saw it on a CPU.
                skip_compiled=True,
            ),
        ):
            try:
                output = self._model(positions=_positions(slices) + rotary_shift, **given)
            except BaseException:
                if shown is not None:
                    # Models with DeepStack keep an image's features until a forward has read them. The
                    # next one is another's, so features of nothing take their place.
                    self._embed(ids, shown.nothing())
                raise
        if isinstance(output, IntermediateTensors):
            self.ranks.hand_on(output)
            return None
        # A model that feeds an EAGLE-3 head gives hidden states of other layers beside.
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _embed(self, ids: Tensor, shown: _Shown) -> Tensor:
        model: Any = self._model
        embeddings: Tensor = model.embed_input_ids(
            ids, multimodal_embeddings=shown.features, is_multimodal=shown.tokens
        )
        return embeddings

    def _adapted(self, slices: Sequence[Slice]) -> contextlib.AbstractContextManager[None]:
        if self.adapters is None:
            return contextlib.nullcontext()
        return self.adapters.computing([(one.adapter, len(one.positions)) for one in slices])


def _images_in(slices: Sequence[Slice]) -> _Shown | None:
    """What the slices' images bring, or None."""
    tokens, features = [], []
    for one in slices:
        if one.images is None:
            tokens.append(torch.zeros(len(one.positions), dtype=torch.bool))
        else:
            shows, rows = one.images.embeddings(one.positions)
            tokens.append(shows)
            features += rows
    return _Shown(torch.cat(tokens), features) if features else None


def _positions(slices: Sequence[Slice]) -> Tensor:
    """What the model is told of the tokens' places, [tokens], or [rows, tokens] where a slice has images
    on a grid (M-RoPE)."""
    places = [
        one.positions if one.images is None else one.images.positions(one.positions)
        for one in slices
    ]
    grids = [place for place in places if place.ndim == 2]
    if grids:
        places = [place.expand(len(grids[0]), -1) for place in places]
    return torch.cat(places, dim=-1)
