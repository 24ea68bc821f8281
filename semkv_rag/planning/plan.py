"""Does reuse pay: what a corpus takes to store, and what it saves each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from semkv_rag.blend.charge import BlendShape, charged_ratio
from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.planning.model_shape import ModelShape
from semkv_rag.planning.timing import Timing

PROMPTS = (1_000, 4_000, 8_000, 32_000)
"""Lengths that a plan tells of, in tokens."""
PLANNED = ("balanced", "fast")
QUESTION = 32
"""Tokens of a prompt that no chunk has."""
CHUNK = 512
STORING = 0.7
"""The share of prefill's speed that storing reaches. An assumption, where it was not measured."""
WORTH = 1.5
"""The speed-up below which reuse is hardly worth its disk."""


@dataclass(frozen=True, slots=True)
class PresetPlan:
    """A blend under one preset.

    Attributes:
        charged_ratio: what is computed, as a share of the full prefill.
        ttft_ms: to the first token, for one request alone.
        speedup: plain prefill's time over it.
    """

    charged_ratio: float
    ttft_ms: float
    speedup: float


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Prompts of one length.

    Attributes:
        plain_ms: to the first token by plain prefill.
        load_ms: for the stored KV to be in the cache.
        break_even_gb_per_s: reading as fast as this takes as long as plain prefill.
        presets: by name.
    """

    tokens: int
    plain_ms: float
    load_ms: float
    break_even_gb_per_s: float
    presets: dict[str, PresetPlan]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to expect.

    Attributes:
        kv_bytes_per_token: one token's KV in vLLM's cache.
        stored_bytes_per_token: what the store takes for a document's token, with all of its contexts.
        store_bytes, precompute_hours: of the whole corpus; None where its size was not given.
        load_gb_per_s: of stored bytes, into the cache.
        measured: whether the machine was measured. Else times are arithmetic on data sheets.
        prompts: by length.
        advice: when not to use it, and what would help.
    """

    model: str
    machine: str
    measured: bool
    kv_bytes_per_token: int
    stored_bytes_per_token: float
    load_gb_per_s: float
    store_bytes: float | None
    precompute_hours: float | None
    prompts: list[PromptPlan]
    advice: list[str]

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def make_plan(
    shape: ModelShape,
    timing: Timing,
    *,
    machine: str,
    storage_gb_per_s: float,
    corpus_tokens: int | None = None,
    contexts: int = 2,
    stored_share: float = 1.0,
    prompts: Sequence[int] = PROMPTS,
) -> Plan:
    """A plan for one model, machine and storage.

    Args:
        machine: what it is called.
        storage_gb_per_s: how fast stored bytes are read.
        corpus_tokens: of all documents.
        contexts: how many times each chunk is stored (`semkv precompute --context`).
        stored_share: what the store's codec makes of the KV's bytes.
        prompts: their lengths, in tokens.

    Raises:
        OptionError: a number is out of its range.
    """
    if not prompts or min(prompts) <= QUESTION:
        raise OptionError(f"prompts of more than {QUESTION} tokens can be planned")
    if corpus_tokens is not None and corpus_tokens < 1:
        raise OptionError(f"a corpus of {corpus_tokens} tokens cannot be planned")
    chunk_bytes = shape.kv_bytes_per_token * stored_share
    rate = min(storage_gb_per_s, timing.load_gb_per_s or storage_gb_per_s)
    # Each context but the first has a sensitivity for each layer, in one byte.
    stored = contexts * chunk_bytes + (contexts - 1) * shape.layers
    told = [_prompt(shape, timing, tokens, chunk_bytes, rate) for tokens in prompts]
    hours = None
    if corpus_tokens is not None:
        per_token_ms = 1000 / timing.stored_tokens_per_s if timing.stored_tokens_per_s else None
        if per_token_ms is None:
            per_token_ms = timing.prefill_ms(CHUNK) / CHUNK / STORING
        hours = corpus_tokens * contexts * per_token_ms / 3.6e6
    return Plan(
        model=shape.name,
        machine=machine,
        measured=timing.measured,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        stored_bytes_per_token=stored,
        load_gb_per_s=rate,
        store_bytes=None if corpus_tokens is None else corpus_tokens * stored,
        precompute_hours=hours,
        prompts=told,
        advice=_advice(told, timing, rate, storage_gb_per_s),
    )


def _prompt(
    shape: ModelShape, timing: Timing, tokens: int, chunk_bytes: float, rate: float
) -> PromptPlan:
    reused = tokens - QUESTION
    plain_ms, load_ms = timing.prefill_ms(tokens), reused * chunk_bytes / rate / 1e6
    blend = BlendShape(shape.layers, reused, fresh=QUESTION, question=QUESTION)
    presets = {}
    for name in PLANNED:
        preset = ReuseOptions.preset(name)
        charged = charged_ratio(preset.selector, preset.ratio_of(reused), blend)
        ttft_ms = timing.blend_ms(tokens, charged, load_ms)
        presets[name] = PresetPlan(charged, ttft_ms, plain_ms / ttft_ms)
    return PromptPlan(tokens, plain_ms, load_ms, reused * chunk_bytes / plain_ms / 1e6, presets)


def _advice(
    prompts: Sequence[PromptPlan], timing: Timing, rate: float, storage: float
) -> list[str]:
    advice = []
    poor = [one.tokens for one in prompts if one.presets["balanced"].speedup < WORTH]
    if len(poor) == len(prompts):
        advice.append("Reuse does not pay here: no prompt is answered much sooner.")
    elif poor:
        advice.append(f"Reuse hardly pays for prompts of {max(poor):,} tokens and less.")
    if all(one.load_ms >= one.plain_ms for one in prompts):
        advice.append(
            f"Loading at {rate:.3g} GB/s takes as long as prefill: faster storage or a smaller codec"
            " comes first."
        )
    elif any(one.load_ms > one.presets["fast"].ttft_ms / 2 for one in prompts):
        waiting = "storage" if rate >= storage else "the way into the cache"
        advice.append(
            f"Loading decides how soon the first token comes ({waiting}: {rate:.3g} GB/s)."
        )
    if not timing.measured:
        advice.append(
            "Times are arithmetic on data sheets: run it with --measure on the machine itself."
        )
    return advice
