"""vLLM's engine client, which keeps what its OpenAI layer leaves out of a streamed answer."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

from vllm import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

REPORTS_KEPT = 10_000
CAPTURE_PREFIX = "semkv-capture-"
"""Ids of requests that are not a caller's: they capture chunks."""


class ReportingLLM(AsyncLLM):
    """Keeps each OpenAI answer's report until it is asked for, and knows whether requests are under way.

    Attributes:
        active: requests under way, captures not counted.
        quiet_since: when the last of them ended, in seconds of `time.monotonic`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.active = 0
        self.quiet_since = time.monotonic()
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        super().__init__(*args, **kwargs)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        counted = not request_id.startswith(CAPTURE_PREFIX)
        self.active += counted
        try:
            async for output in super().generate(prompt, sampling_params, request_id, **options):
                if output.kv_transfer_params is not None:
                    self._keep(request_id, output.kv_transfer_params)
                yield output
        finally:
            if counted:
                self.active -= 1
                self.quiet_since = time.monotonic()

    def _keep(self, request_id: str, report: dict[str, Any]) -> None:
        # vLLM's ids are `chatcmpl-ID` and `cmpl-ID-0`, with the ID of the request or its header.
        kind, _, rest = request_id.partition("-")
        if kind in ("chatcmpl", "cmpl"):
            self._reports[rest.partition("-")[0]] = report
            while len(self._reports) > REPORTS_KEPT:
                self._reports.popitem(last=False)

    def take_report(self, request_id: str) -> dict[str, Any] | None:
        """The report of the OpenAI request of this id (or `x-request-id`), once."""
        return self._reports.pop(request_id, None)
