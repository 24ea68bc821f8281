"""A request that was looked up in the prompt cache, and what does so, as the engine client sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from semkv_rag.prompt_cache import Lookup
from semkv_rag.report import ReuseReport


@dataclass(frozen=True)
class LookedUp:
    """A request that was looked up.

    Attributes:
        prompt: what is sent to the model, rendered.
        params: with our wishes.
        lookup: what the tiers say.
        ticket: of its capture, or None.
    """

    prompt: Any
    params: SamplingParams
    lookup: Lookup
    ticket: int | None

    def with_outcome(self, report: ReuseReport) -> ReuseReport:
        """A report with what the tiers say."""
        served = self.lookup.served
        return replace(
            report,
            tiers={**self.lookup.statuses, **report.tiers},
            served_by=None if served is None else served.tier,
            donor=None if served is None else served.donor.id,
            similarity=None if served is None else round(served.similarity, 4),
            explored=self.lookup.explored,
        )


class LooksUp(Protocol):
    """What the engine client calls around each request: `semkv_rag.engine.prompt_lookup`."""

    async def begin(
        self, prompt: Any, params: SamplingParams, lora: LoRARequest | None
    ) -> LookedUp | None: ...

    def end(
        self,
        request: LookedUp,
        request_id: str,
        report: ReuseReport | None,
        *,
        latency_s: float,
        captured: bool,
    ) -> None: ...

    def close(self) -> None: ...
