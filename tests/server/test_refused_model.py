"""A model that runs without our connector is served by plain vLLM, and answers say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from workbench.server import Server


@pytest.mark.soak  # in `make test` an engine answers such a model's requests: `test_isolation.py`
def test_each_answer_says_why(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with Server(tiny_model("lfm2"), tmp_path, ("--enforce-eager",)) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
        text = "the store keeps the floor . " * 12
        asked = {"model": server.model, "prompt": text, "max_tokens": 2, "temperature": 0.0}
        reports = [
            client.completions.create(**asked).model_extra["kv_transfer_params"]["semkv"]
            for _ in range(2)
        ]
        (last,) = [
            extra["kv_transfer_params"]["semkv"]
            for chunk in client.completions.create(**asked, stream=True)
            if (extra := chunk.model_extra) and "kv_transfer_params" in extra
        ]
        for report in (*reports, last):
            assert report["kv_cache"] == "skip"
            assert "it has recurrent layers" in report["reason"]
            assert report["prompt_tokens"] == reports[0]["prompt_tokens"] > 128
        # What vLLM's own prefix cache holds, it holds for them, too.
        assert reports[0]["cached_tokens"] == 0
        assert reports[1]["cached_tokens"] == last["cached_tokens"] >= 128
        ready = httpx.get(server.base_url.removesuffix("/v1") + "/ready")
        assert (ready.status_code, ready.json()) == (503, {"gate": False, "store": True})
