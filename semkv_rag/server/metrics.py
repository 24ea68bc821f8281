"""What `/metrics` says beside the counts of requests, read when somebody asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from semkv_rag.engine.gauges import TEXTS, Stored, samples, stored_in
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.totals import Totals
from semkv_rag.errors import SemKVError

logger = logging.getLogger(__name__)

STORE_S: Final = 10.0
"""How old what is said of the store may be. It is counted beside the server's loop."""


class StateCollector(Collector):
    """An engine's state as Prometheus' metrics; see `samples` for the arguments."""

    def __init__(self, totals: Totals, capturer: LLMCapturer, *, servable: bool) -> None:
        self._totals, self._capturer, self._servable = totals, capturer, servable
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="semkv-metrics")
        self._stored: Stored | None = None
        self._counted_at = float("-inf")

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        if time.monotonic() - self._counted_at > STORE_S:
            self._counted_at = time.monotonic()
            self._pool.submit(self._count)
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        stored = self._stored
        for name, labels, value in samples(
            self._totals, self._capturer, stored, servable=self._servable
        ):
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name, TEXTS[name], labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()

    def close(self) -> None:
        """Count no more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _count(self) -> None:
        try:
            self._stored = stored_in(self._capturer.store)
        except SemKVError as error:
            logger.info("semkv: the store could not be counted: %s", error)
            self._stored = None
