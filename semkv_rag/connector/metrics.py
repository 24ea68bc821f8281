"""What an operator sees of reuse at the server's `/metrics`.

The scheduler's side counts each request when it ends (`ReuseStats`), and with it how long blends held up
steps since the last one. vLLM carries the counts to the user's process with its own
(`get_kv_connector_stats`), and has `ReuseMetrics` enter them there. Labels are vLLM's `model_name` and
`engine`, and one of ours; none comes from a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from semkv_rag.report import ReuseReport

Fault: TypeAlias = Literal["index", "chunk", "not_finite", "internal"]
"""What went wrong with a request's reuse: the store's index did not answer; stored KV could not be
read or was damaged; the model gave no numbers with it; an error of this package."""

PlainReason: TypeAlias = Literal[
    "off", "request", "model", "store", "no_chunk", "slower", "no_room", "fault"
]
"""Why a request was answered without stored KV: it wanted none; it cannot be served with it, or had wrong
options; the model cannot; the store could not be opened; no stored chunk was found; loading would have
taken longer than computing; the paged cache had no room for a blend; its reuse failed."""

REQUESTS: Final = "semkv_requests"
PLAIN_REQUESTS: Final = "semkv_plain_requests"
TOKENS: Final = "semkv_prompt_tokens"
BYTES: Final = "semkv_loaded_bytes"
FAULTS: Final = "semkv_faults"
SECONDS: Final = {
    "match": ("semkv_match_seconds", "From a request's arrival at the scheduler to its plan."),
    "load": ("semkv_load_seconds", "Loading a request's stored KV into its blocks."),
    "blend": ("semkv_blend_seconds", "A request's whole blend, loading included."),
    "pick": ("semkv_pick_seconds", "Picking the tokens to compute: the question's pass."),
    "recompute": ("semkv_recompute_seconds", "Computing the picked tokens and the fresh ones."),
    "stall": ("semkv_stall_seconds", "What blends added to a step in which others were served."),
}
_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
PARTIAL: Final = 0.5
"""The share of a prompt's tokens that must come from the store or the prefix cache in a hit."""


@dataclass
class ReuseStats(KVConnectorStats):
    """Counts of the requests that ended since they were taken last.

    Attributes:
        data: plain values, as they travel to the user's process. `counts` has a number by metric and its
            own label, `seconds` a list by time.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"counts": {}, "seconds": {}}

    def is_empty(self) -> bool:
        return not self.data["counts"] and not self.data["seconds"]

    def take(self) -> ReuseStats:
        """What was counted, which is counted here no more."""
        taken = ReuseStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> ReuseStats:
        for metric, labels in other.data["counts"].items():
            for label, count in labels.items():
                self._add(metric, label, count)
        for name, values in other.data["seconds"].items():
            self.data["seconds"].setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log."""
        requests = self.data["counts"].get(REQUESTS, {})
        tokens = self.data["counts"].get(TOKENS, {})
        return {
            **{f"requests {outcome}": count for outcome, count in requests.items()},
            **{f"tokens {kind}": count for kind, count in tokens.items()},
        }

    def count(
        self,
        report: ReuseReport,
        loaded_tokens: int,
        fault: Fault | None,
        plain_reason: PlainReason | None,
        seconds: Mapping[str, float],
        stalls_s: Iterable[float],
    ) -> None:
        """Count a request that ended.

        Args:
            loaded_tokens: of its prompt, those whose KV is as it was stored.
            fault: what went wrong, if anything did.
            plain_reason: why it was answered without stored KV; None where it was not.
            seconds: what `pick` and `recompute` took, where there was a blend.
            stalls_s: of the steps since the last request that was counted, whoever's blends they were.
        """
        self._add(REQUESTS, _outcome(report), 1)
        if plain_reason is not None:
            self._add(PLAIN_REQUESTS, plain_reason, 1)
        if fault is not None:
            self._add(FAULTS, fault, 1)
        recomputed = report.recomputed_tokens
        computed = report.prompt_tokens - report.cached_tokens - loaded_tokens - recomputed
        tokens = {
            "cached": report.cached_tokens,
            "loaded": loaded_tokens,
            "recomputed": recomputed,
            "computed": max(0, computed),
        }
        for kind, count in tokens.items():
            self._add(TOKENS, kind, count)
        self._add(BYTES, "memory", report.memory_bytes)
        self._add(BYTES, "file", report.file_bytes)
        self._add(BYTES, "object", report.object_bytes)
        for name in ("match", "load", "blend"):
            if took_ms := getattr(report, f"{name}_ms"):
                self._took(name, took_ms / 1000)
        for name, took_s in seconds.items():
            self._took(name, took_s)
        for took_s in stalls_s:
            self._took("stall", took_s)

    def _took(self, name: str, took_s: float) -> None:
        """Note a time, by its name in `SECONDS`."""
        self.data["seconds"].setdefault(name, []).append(took_s)

    def _add(self, metric: str, label: str, count: int) -> None:
        labels = self.data["counts"].setdefault(metric, {})
        labels[label] = labels.get(label, 0) + count


def _outcome(report: ReuseReport) -> str:
    """`hit`, `partial`, `miss` or `skip`."""
    reused = max(report.exact_tokens + report.reused_tokens, report.cached_tokens)
    if report.kv_cache == "hit" and reused < PARTIAL * report.prompt_tokens:
        return "partial"
    return report.kv_cache


class ReuseMetrics(KVConnectorPromMetrics):
    """Our metrics in the registry that `/metrics` shows; made and called by vLLM."""

    COUNTERS: Final = {
        REQUESTS: ("outcome", "Requests that ended, by what reuse did for them."),
        PLAIN_REQUESTS: ("reason", "Requests that were answered without stored KV, by why."),
        TOKENS: ("kind", "Tokens of prompts, by where their KV came from."),
        BYTES: ("tier", "Bytes of stored KV that requests loaded, by where it was."),
        FAULTS: ("kind", "Requests whose reuse failed, and that were computed."),
    }
    """Each metric's own label and what it counts, by the metric's name."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=name, documentation=text, labelnames=[*labelnames, label]
            )
            for name, (label, text) in self.COUNTERS.items()
        }
        self._seconds = {
            short: create_metric_per_engine(
                metric_types[Histogram](
                    name=name, documentation=text, buckets=_BUCKETS, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for short, (name, text) in SECONDS.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, labels in transfer_stats_data["counts"].items():
            for label, count in labels.items():
                self._counters[name].labels(*values, label).inc(count)
        for name, times in transfer_stats_data["seconds"].items():
            for took_s in times:
                self._seconds[name][engine_idx].observe(took_s)
