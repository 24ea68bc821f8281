"""The gate: before a model is served with reuse, check on the model itself that reuse is right.

Run once per worker, at start-up, on a few dozen tokens in blocks that nothing uses yet:

1. the keys of tokens computed at one position, moved to another, are the keys computed there; this
   also finds out how each layer rotates (or that it does not);
2. a blend that recomputes everything gives the hidden states of plain prefill;
3. so does a blend that recomputes a third of the tokens behind a check layer, when the stored KV is
   right: this checks scattered attention and the writing of stored KV;
4. and once more in pieces, as prompts beyond vLLM's batch size are blended;
5. and once more behind a pass of the question, which borrows blocks;
6. the attention of layers with a sliding window or sinks, over random KV that is longer than the window,
   is what a dense reference gives.

A model that fails is answered plainly, and the reason is said once. Where there are several ranks, they
agree on each check before the next: one that went on alone would wait for the others forever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.messages import REFUSED_ON_ANOTHER_RANK, BlendTask, GateReport
from semkv_rag.connector.worker.attention_check import attention_error, scattered
from semkv_rag.connector.worker.blend.blend_pass import BlendPass
from semkv_rag.connector.worker.model.model_view import Unservable
from semkv_rag.connector.worker.model.slice import Slice
from semkv_rag.connector.worker.ranks import total
from semkv_rag.reuse import ReusePlan, Span
from semkv_rag.store.codecs import PLAIN, EncodedLayer, codec_named

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 40
PREFIX_TOKENS = 7
QUESTION_TOKENS = 9
SHIFT = 23
BEYOND_WINDOW = 64
RUNS = 8

# Largest relative error, by dtype: far above rounding, far below a wrong rotation (about 1).
TOLERANCES = {torch.float32: 0.005, torch.float16: 0.05, torch.bfloat16: 0.15}

# With a cache of 8 bits a key is rounded differently at each position, and hidden states drift apart from
# layer to layer. In the 30 layers of SmolLM2-135M values are at most 0.11 off, keys by a wrong rotation
# at least 0.36.
DRIFT_8_BITS = 0.3


def agreed(reason: str | None, device: torch.device) -> str | None:
    """Why a model is refused, on whichever rank; called on all of them at once.

    Args:
        reason: this rank's.
    """
    refused = torch.full((1,), float(reason is not None), device=device)
    return (reason or REFUSED_ON_ANOTHER_RANK) if float(total(refused)) else None


def why_not(attempt: Callable[[], None]) -> str | None:
    """Why an attempt to serve a model with reuse did not succeed, in words, or None."""
    try:
        attempt()
    except Unservable as reason:
        return str(reason)
    except Exception as error:
        logger.exception("The gate failed; the engine runs without reuse")
        return f"the gate failed: {error!r}"
    return None


class _MemorySource:
    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self._layers = layers

    def encoded(self, index: int) -> EncodedLayer:
        keys, values = self._layers[index]
        return EncodedLayer(codec_named(PLAIN), {"k": keys, "v": values}, keys.dtype)

    def sensitivity(self) -> Tensor | None:
        return None


@torch.inference_mode()
def run_gate(
    blend_pass: BlendPass, *, vocabulary: int, block_size: int, blocks: int, dtype: torch.dtype
) -> GateReport:
    """Check the model of `blend_pass`, and set each layer's `rotary` to what was found.

    Args:
        vocabulary: token ids below it are valid.
        blocks: blocks of the paged cache; the first is vLLM's null block and is not touched.
        dtype: the model's, which says how exact the checks can be.
    """
    tokens = PREFIX_TOKENS + CHUNK_TOKENS + QUESTION_TOKENS
    held = -(-tokens // block_size)
    needed = blend_pass.setting.model.paged.groups * held
    if needed >= blocks:
        return GateReport(False, f"the KV cache has {blocks} blocks, the gate needs {needed + 1}")
    gate = _Gate(blend_pass, vocabulary, held, TOLERANCES[dtype])
    reason = (
        gate.agreed(gate.find_rotation())
        or gate.check_blends()
        or gate.agreed(gate.check_masks(blocks, dtype))
    )
    return GateReport(reason is None, reason, float(f"{gate.largest_error:.2g}"))


class _Gate:
    def __init__(self, blend_pass: BlendPass, vocabulary: int, held: int, tolerance: float) -> None:
        self._pass, self._model = blend_pass, blend_pass.setting.model
        self._blocks = self._model.paged.first_blocks(held)
        self._tolerance = tolerance
        self.largest_error = 0.0
        count = PREFIX_TOKENS + CHUNK_TOKENS + QUESTION_TOKENS
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (count,), generator=generator).tolist()
        self._covered = PREFIX_TOKENS + CHUNK_TOKENS

    def agreed(self, reason: str | None) -> str | None:
        """The reason that all ranks agree on: this rank's, another's, or None."""
        return agreed(reason, self._blocks.device)

    def find_rotation(self) -> str | None:
        chunk = self._tokens[PREFIX_TOKENS : self._covered]
        here, _ = self._computed(chunk, 0)
        there, _ = self._computed(chunk, SHIFT)
        if len(here) < len(self._model.layers):
            return "not all of its layers hand their keys to the cache: it writes KV itself"
        for index, layer in enumerate(self._model.layers):
            (keys, values), (moved_keys, moved_values) = here[index], there[index]
            drifts = index > 0 and layer.attention.kv_cache_dtype.startswith("fp8")
            tolerance = DRIFT_8_BITS if drifts else self._tolerance
            if not self._close(values, moved_values, tolerance):
                return (
                    f"the values of layer {index} change with the position: "
                    "its positions are not relative"
                )
            moved = [
                keys if candidate is None else candidate.rotate(keys, SHIFT)
                for candidate in layer.candidates
            ]
            errors = [self._error(one, moved_keys) for one in moved]
            best = errors.index(min(errors))
            if not self._close(moved[best], moved_keys, tolerance):
                return f"the keys of layer {index} cannot be moved to another position"
            layer.rotary = layer.candidates[best]
        return None

    def check_blends(self) -> str | None:
        in_place, plain = self._computed(self._tokens, 0)
        rows = slice(PREFIX_TOKENS, self._covered)
        # From the host's memory, as files' KV comes.
        right = _MemorySource([(k[rows].cpu(), v[rows].cpu()) for k, v in in_place])
        whole = self._pass.setting.piece_tokens
        for options, piece_tokens, what in (
            (ReuseOptions(ratio=1.0), whole, "recomputes everything"),
            (ReuseOptions(ratio=1 / 3, selector="kv_deviation"), whole, "reuses right KV"),
            (
                ReuseOptions(ratio=1 / 3, selector="kv_deviation"),
                CHUNK_TOKENS // 2,
                "runs in pieces",
            ),
            (
                ReuseOptions(ratio=1 / 3, selector="sensitivity_attention"),
                whole,
                "asks the question",
            ),
        ):
            # What the blend does not write must not be right by having been there before.
            self._computed(self._tokens[::-1], 0)
            span = Span("gate", 0, PREFIX_TOKENS, CHUNK_TOKENS, base=PREFIX_TOKENS)
            plan = ReusePlan((span,), self._covered, options).asking(self._tokens)
            blocks = tuple(self._blocks.tolist())
            task = BlendTask("gate", plan, self._tokens[: self._covered], blocks, 0)
            self._pass.setting.piece_tokens = piece_tokens
            try:
                self._pass.run(task, nullcontext({"gate": right}))
            finally:
                self._pass.setting.piece_tokens = whole
            positions = torch.arange(self._covered, len(self._tokens), device=self._blocks.device)
            asked = Slice(self._tokens[self._covered :], self._blocks, positions)
            hidden = self._model.forward([asked])
            same = self._same(hidden, plain)
            wrong = f"a blend that {what} does not give what plain prefill gives"
            if reason := self.agreed(None if same else wrong):
                return reason
        return None

    def check_masks(self, blocks: int, dtype: torch.dtype) -> str | None:
        """Tokens as few as the other checks have stand within any model's window."""
        limit = min(
            self._model.config.model_config.max_model_len,
            (blocks - 1) * self._model.paged.block_size,
        )
        layers = enumerate(self._model.layers)
        kinds = {(layer.window, layer.sinks is not None): index for index, layer in layers}
        for (window, sunk), index in kinds.items():
            tokens = min((window or 0) + BEYOND_WINDOW, limit)
            if not sunk and (window is None or tokens <= window):
                continue
            generator = torch.Generator().manual_seed(index)
            positions, behind = scattered(min(BEYOND_WINDOW, tokens), RUNS, generator)
            shift = tokens - min(BEYOND_WINDOW, tokens)
            error, _ = attention_error(
                self._pass.setting,
                index,
                positions + shift,
                behind + shift,
                tokens,
                dtype,
                generator,
            )
            self.largest_error = max(self.largest_error, error)
            if not error <= self._tolerance:
                return f"the attention of layer {index} is not what its window and sinks give"
        return None

    def _computed(
        self, tokens: list[int], rotary_shift: int
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """This rank's layers' K and V of `tokens` computed from position 0, and the hidden states."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            keys, values = self._model.as_heads(index, keys, values)
            seen[index] = keys.clone(), values.clone()

        positions = torch.arange(len(tokens), device=self._blocks.device)
        with self._model.tap.handling(keep):
            computed = Slice(tokens, self._blocks, positions)
            hidden = self._model.forward([computed], rotary_shift=rotary_shift)
        return [seen[index] for index in sorted(seen)], hidden

    def _same(self, asked: Tensor | None, plain: Tensor | None) -> bool:
        """Whether the question's hidden states are those of plain prefill; the last stage has both."""
        if asked is None or plain is None:
            return True
        expected = plain.reshape(len(self._tokens), -1)[self._covered :]
        return self._close(asked.reshape(QUESTION_TOKENS, -1), expected)

    def _error(self, a: Tensor, b: Tensor) -> float:
        a, b = a.float(), b.float()
        return float((a - b).norm() / b.norm().clamp_min(1e-9))

    def _close(self, a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
        error = self._error(a, b)
        self.largest_error = max(self.largest_error, error)
        return error <= (self._tolerance if tolerance is None else tolerance)
