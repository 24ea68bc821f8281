"""The report of an answer that no connector of ours had a part in."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import RequestOutput

from semkv_rag.engine.outcome import plain_params
from semkv_rag.report import ReuseReport


@pytest.mark.parametrize("others", [None, {"remote_block_ids": [1, 2]}], ids=["none", "another's"])
def test_what_another_connector_says_stays(others: dict[str, Any] | None) -> None:
    output = RequestOutput(
        request_id="1",
        prompt=None,
        prompt_token_ids=[5, 6, 7],
        prompt_logprobs=None,
        outputs=[],
        finished=True,
        num_cached_tokens=2,
        kv_transfer_params=others,
    )
    params = plain_params(output, "no reuse: no store was given")
    report = ReuseReport.from_mapping(params.pop("semkv"))
    assert params == (others or {})
    assert (report.kv_cache, report.prompt_tokens, report.cached_tokens) == ("skip", 3, 2)
    assert report.reason == "no reuse: no store was given"
