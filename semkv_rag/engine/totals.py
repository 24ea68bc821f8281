"""Counts of the requests that an engine has answered, in the names of the metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from semkv_rag.connector.metrics import SECONDS, ReuseStats
from semkv_rag.report import ReuseReport


class Totals:
    """Counts of the requests that ended; for one thread.

    Attributes:
        tiers: of the prompt cache, how often each had each status.
    """

    def __init__(self) -> None:
        self.tiers: Counter[tuple[str, str]] = Counter()
        self._counts: dict[str, Counter[str]] = {}
        self._seconds: dict[str, tuple[int, float]] = {}

    def count(self, report: ReuseReport, **counts: Any) -> None:
        """As `ReuseStats.count`."""
        stats = ReuseStats()
        stats.count(report, **counts)
        for name, labels in stats.data["counts"].items():
            self._counts.setdefault(f"{name}_total", Counter()).update(labels)
        for tier, status in report.tiers.items():
            self.tiers[tier, status] += 1
        for name, times in stats.data["seconds"].items():
            count, total = self._seconds.get(name, (0, 0.0))
            self._seconds[name] = (count + len(times), total + sum(times))

    def to_mapping(self) -> dict[str, dict[str, float]]:
        """The counts by metric and label; of times, how many there were and their sum in seconds."""
        counts: dict[str, dict[str, float]] = {
            name: dict(labels) for name, labels in self._counts.items()
        }
        times = {
            SECONDS[name][0]: {"count": count, "sum": total}
            for name, (count, total) in self._seconds.items()
        }
        return {**counts, **times}
