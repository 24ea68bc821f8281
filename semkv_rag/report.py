"""The reuse report: what a response says about its own reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

Status = Literal["hit", "miss", "skip"]


@dataclass(frozen=True, slots=True)
class Explored:
    """A stored prompt whose answer might have done; the guard learns from being told whether.

    Attributes:
        namespace: whose both prompts are.
        donor: the stored prompt, by its chunk id.
        layer, encoder: what found it.
        similarity: of the prompt to it, -1 to 1.
    """

    namespace: str
    donor: str
    layer: str
    encoder: str
    similarity: float


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What was reused to answer one request. All counts are tokens of its prompt.

    Attributes:
        kv_cache: `hit` when stored KV was used, `miss` when the prompt holds no stored chunk or its
            KV could not be used, `skip` when reuse was switched off or cannot be had.
        prompt_tokens: tokens of the prompt.
        cached_tokens: found in vLLM's own prefix cache (L0).
        exact_tokens: reused as they are, because their whole left context was the stored one.
        reused_tokens: reused behind another context, the recomputed ones included.
        recomputed_tokens: of the reused ones, those the selector had computed again.
        ratio: the recompute ratio that was asked for; of `auto`, the one that was spent.
        risk: how far the answer is expected to be from full prefill's, the mean KL divergence over its
            tokens, nats a token; None where the selector cannot tell.
        charged_ratio: the blend's share of a full prefill of the same tokens, with the layers that
            were computed for every token counted in, 0 to 1.
        selector: the selector that picked.
        chunk_ids: the stored chunks that were used, in prompt order.
        codecs: by which their KV is stored, each once; nothing of a lossy one counts as exact.
        match_ms: finding the chunks in the prompt.
        load_ms: waiting for KV from files, verification and rotation included.
        blend_ms: the blend pass, loading included.
        memory_bytes: of the stored chunks that were used, those that stood in the RAM tier.
        file_bytes: of them, those that were read from files while the request waited. With several
            GPUs both are of one.
        preemptions: how often vLLM dropped the request's KV for others' and started it again.
        reason: in words, why nothing was reused, or why it was computed after all.
        images_loaded: images whose features were taken from the store (fusion, L1.5).
        images_computed: images that went through the vision tower.
        images_near: of the loaded ones, those that are a stored image's in the prompt's own image's
            place.
        tiers: the status of each tier over whole prompts, and of `fusion` where there are images;
            empty where none was asked.
        served_by: the tier that found a donor, such as `exact_text`.
        donor: the stored prompt it found, by its chunk id.
        similarity: of the prompt to it, -1 to 1.
        explored: with `reuse="substitute"`, the donor that was not taken because the guard does not
            know it well enough yet; tell it by `Engine.record` whether its answer would have done.
    """

    kv_cache: Status = "miss"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    exact_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    ratio: float = 0.0
    risk: float | None = None
    charged_ratio: float = 0.0
    selector: str = ""
    chunk_ids: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    match_ms: float = 0.0
    load_ms: float = 0.0
    blend_ms: float = 0.0
    memory_bytes: int = 0
    file_bytes: int = 0
    preemptions: int = 0
    reason: str | None = None
    images_loaded: int = 0
    images_computed: int = 0
    images_near: int = 0
    tiers: Mapping[str, Status] = field(default_factory=dict)
    served_by: str | None = None
    donor: str | None = None
    similarity: float | None = None
    explored: Explored | None = None

    def with_images(self, loaded: int, computed: int, near: int, reason: str | None) -> ReuseReport:
        """With what became of the request's images; no image at all went in where KV covers them."""
        fusion: Status = "miss" if computed else "hit" if loaded else "skip"
        reasons = [text for text in (self.reason, reason) if text]
        return replace(
            self,
            images_loaded=loaded,
            images_computed=computed,
            images_near=near,
            tiers={**self.tiers, "fusion": fusion},
            reason="; ".join(reasons) or None,
        )

    def to_mapping(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            **asdict(self),
            "chunk_ids": list(self.chunk_ids),
            "codecs": list(self.codecs),
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ReuseReport:
        """The report out of a response's JSON; fields of a newer version are left out."""
        known = {field.name for field in fields(cls)}
        taken = {name: value for name, value in values.items() if name in known}
        if (explored := taken.get("explored")) is not None:
            taken["explored"] = Explored(**explored)
        lists = {name: tuple(taken.get(name, ())) for name in ("chunk_ids", "codecs")}
        return cls(**{**taken, **lists})


def log_line(name: str, report: ReuseReport, *, latency_s: float) -> str:
    """One request in one line.

    `[sample_001] hit (text:exact) | latency=0.032s | exact_text=hit, semantic_text=skip,
    embedding:vision=skip, kv_cache=hit | tokens_reused=128`. Stored KV may be found in a prompt that no
    tier knows: that is `hit (kv_cache)`; `hit (fusion)` is one whose images' features alone were.

    Args:
        name: of the request.
    """
    statuses = {**report.tiers, "kv_cache": report.kv_cache}
    told = ", ".join(f"{tier}={status}" for tier, status in statuses.items())
    reused = report.exact_tokens + report.reused_tokens
    return (
        f"[{name}] {_served(report)} | latency={latency_s:.3f}s | {told} | tokens_reused={reused}"
    )


def _served(report: ReuseReport) -> str:
    if report.served_by is not None:
        names = {"exact_text": "text:exact", "semantic_text": "text:semantic"}
        return f"hit ({names.get(report.served_by, report.served_by)})"
    if report.kv_cache == "hit":
        return "hit (kv_cache)"
    return "hit (fusion)" if report.tiers.get("fusion") == "hit" else "miss"
