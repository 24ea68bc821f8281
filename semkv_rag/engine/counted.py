"""What an engine has answered since it was started."""

from __future__ import annotations

from typing import Any

from semkv_rag.engine.client import ReportingLLM


class Counted:
    """The part of `Engine` that tells what it has answered."""

    _llm: ReportingLLM | None

    def stats(self) -> dict[str, Any]:
        """What was answered since the engine was started, as [metrics](report.md#metrics) of a server.

        Returns:
            By metric: counts by label, such as `{"semkv_requests_total": {"hit": 3}}`; of times `count`
            and `sum`, seconds. A metric that counted nothing is left out.
        """
        return {} if self._llm is None else self._llm.totals.to_mapping()
