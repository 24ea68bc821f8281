"""The reuse report: what a response says about its own reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from semkv_rag.errors import OptionError
from semkv_rag.token_map import TokenMap, html

if TYPE_CHECKING:
    from rich.console import RenderableType

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
        ratio: the recompute ratio that was asked for, with `least_tokens` of a short prompt counted in;
            of `auto`, the one that was spent.
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
        file_bytes: of them, those that were read from files of this machine while the request
            waited.
        object_bytes: of them, those that were fetched from the object store meanwhile.
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
        token_map: what became of each token, where the request's options asked for it.
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
    object_bytes: int = 0
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
    token_map: TokenMap | None = None

    def with_images(self, loaded: int, computed: int, near: int, reason: str | None) -> ReuseReport:
        """This report with the outcome of its images. An image that KV covers is not counted."""
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
            "token_map": None if self.token_map is None else self.token_map.to_mapping(),
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ReuseReport:
        """The report out of a response's JSON; fields of a newer version are left out."""
        known = {field.name for field in fields(cls)}
        taken = {name: value for name, value in values.items() if name in known}
        if (explored := taken.get("explored")) is not None:
            taken["explored"] = Explored(**explored)
        if (token_map := taken.get("token_map")) is not None:
            taken["token_map"] = TokenMap.from_mapping(token_map)
        lists = {name: tuple(taken.get(name, ())) for name in ("chunk_ids", "codecs")}
        return cls(**{**taken, **lists})

    def to_html(self) -> str:
        """The prompt coloured by what became of each token, as a page of HTML.

        Raises:
            OptionError: the request did not ask for its token map.
        """
        return html.page(self._map(), self._facts(), self.reason)

    def _repr_html_(self) -> str | None:
        """The same in a notebook; None where there is no token map."""
        if self.token_map is None:
            return None
        return html.element(self.token_map, self._facts(), self.reason)

    def __rich__(self) -> RenderableType:
        """The same in a terminal, for `rich.print`.

        Raises:
            OptionError: as `to_html`.
        """
        from semkv_rag.token_map.terminal import renderable

        return renderable(self._map(), self._facts(), self.reason)

    def _map(self) -> TokenMap:
        if self.token_map is None:
            raise OptionError("the report has no token map: ask with token_map=True")
        return self.token_map

    def _facts(self) -> list[tuple[str, str]]:
        """What stands beside the token map: what and how much."""
        facts = [("reuse", _served(self))]
        if self.blend_ms:
            facts += [("blend", f"{self.blend_ms:.0f} ms"), ("loading", f"{self.load_ms:.0f} ms")]
        if self.selector and self.reused_tokens:
            facts.append(("selector", f"{self.selector}, ratio {self.ratio:.2g}"))
        if self.risk is not None:
            facts.append(("expected loss", f"{self.risk:.3f} nats a token"))
        return facts


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
