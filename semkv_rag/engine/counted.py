"""What an engine has answered since it was started."""

from __future__ import annotations

from typing import Any

from semkv_rag.connector.messages import GateReport
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.gauges import samples, stored_in
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.store import KVStore


class Counted:
    """The part of `Engine` that tells what it has answered."""

    _llm: ReportingLLM | None
    _capturer: LLMCapturer | None
    gate: GateReport
    store: KVStore | None

    def stats(self) -> dict[str, Any]:
        """What was answered since the engine was started, as [metrics](report.md#metrics) of a server.

        Returns:
            By metric: counts by label, such as `{"semkv_requests_total": {"hit": 3}}`, or a number where
            it has no label; of times `count` and `sum`, seconds. A metric that counted nothing is left
            out.

        Raises:
            StoreError: the store's index does not answer.
        """
        if self._llm is None:
            return {}
        stats: dict[str, Any] = self._llm.totals.to_mapping()
        stored = None if self.store is None else stored_in(self.store)
        totals, servable = self._llm.totals, self.gate.servable
        for name, labels, value in samples(totals, self._capturer, stored, servable=servable):
            if labels:
                stats.setdefault(name, {})[" ".join(labels.values())] = value
            else:
                stats[name] = value
        return stats
