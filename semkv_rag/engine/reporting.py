"""vLLM's engine client, with the tiers around it.

It keeps what vLLM's OpenAI layer leaves out of a streamed answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from vllm import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM

from semkv_rag.engine.images import keep_images
from semkv_rag.engine.transfer import CAPTURED_KEY, PARAMS_KEY
from semkv_rag.report import ReuseReport

if TYPE_CHECKING:
    from semkv_rag.engine.tiering import Tiering

REPORTS_KEPT = 10_000
CAPTURE_PREFIX = "semkv-capture-"
"""Ids of requests that are not a caller's: they capture chunks."""


class ReportingLLM(AsyncLLM):
    """Looks requests up in the tiers, keeps each OpenAI answer's report until it is asked for, and knows
    whether requests are under way.

    Attributes:
        active: requests under way, captures not counted.
        quiet_since: when the last of them ended, in seconds of `time.monotonic`.
        tiering: the tiers over whole prompts, or None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.active = 0
        self.quiet_since = time.monotonic()
        self.tiering: Tiering | None = None
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        super().__init__(*args, **kwargs)
        keep_images(self.renderer)

    async def render(self, prompt: Any) -> Any:
        """A prompt as vLLM's OpenAI layer passes it on: tokens, with images as tensors.

        Args:
            prompt: text, tokens, or vLLM's dictionary of a prompt.
        """
        parsed = parse_model_prompt(self.model_config, prompt)
        (rendered,) = await self.renderer.render_cmpl_async([parsed])
        return rendered

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        counted = not request_id.startswith(CAPTURE_PREFIX)
        self.active += counted
        began = time.perf_counter()
        tiering = self.tiering if counted else None
        tiered = None
        report: ReuseReport | None = None
        captured = False
        try:
            if tiering is not None:
                tiered = await tiering.begin(prompt, sampling_params)
            if tiered is not None:
                prompt, sampling_params = tiered.prompt, tiered.params
            async for output in super().generate(prompt, sampling_params, request_id, **options):
                if (params := output.kv_transfer_params) is not None:
                    captured = params.pop(CAPTURED_KEY, False)
                    if tiered is not None and PARAMS_KEY in params:
                        report = tiered.told(ReuseReport.from_mapping(params[PARAMS_KEY]))
                        params[PARAMS_KEY] = report.to_mapping()
                    self._keep(request_id, params)
                yield output
        finally:
            if tiering is not None and tiered is not None:
                latency_s = time.perf_counter() - began
                tiering.end(tiered, request_id, report, latency_s=latency_s, captured=captured)
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
