"""`semkv stats`: what a running server has answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from semkv_rag.cli import app
from semkv_rag.cli import stats as stats_module
from semkv_rag.cli.stats import quantile, read
from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError
from workbench.answers import blended
from workbench.chunks import random_tokens, store_chunks
from workbench.server import Server

METRICS = """
# TYPE semkv_requests_total counter
semkv_requests_total{engine="0",model_name="m",outcome="hit"} 3.0
semkv_requests_total{engine="1",model_name="m",outcome="hit"} 1.0
semkv_requests_total{engine="0",model_name="m",outcome="miss"} 1.0
# TYPE semkv_loaded_bytes_total counter
semkv_loaded_bytes_total{engine="0",model_name="m",tier="file"} 5e+06
# TYPE semkv_load_seconds histogram
semkv_load_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
semkv_load_seconds_bucket{engine="0",le="0.2",model_name="m"} 3.0
semkv_load_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
semkv_load_seconds_count{engine="0",model_name="m"} 4.0
semkv_load_seconds_sum{engine="0",model_name="m"} 0.7
# TYPE python_info gauge
python_info{version="3.11"} 1.0
"""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    """What a server answers; the last one again and again."""
    given = [httpx.Response(200, text=METRICS)]

    def get(url: str, **options: Any) -> httpx.Response:
        assert url == "http://server/metrics"
        return given.pop(0) if len(given) > 1 else given[0]

    monkeypatch.setattr(stats_module.httpx, "get", get)
    return given


@pytest.mark.usefixtures("answers")
def test_counts_of_all_engines_and_quantiles() -> None:
    stats = read("http://server/v1", "key")
    assert stats["semkv_requests_total"] == {"hit": 4, "miss": 1}
    assert stats["semkv_load_seconds"] == {
        "count": 4, "sum": 0.7, "p50": pytest.approx(0.15), "p95": pytest.approx(0.2)
    }  # fmt: skip
    assert "python_info" not in stats


@pytest.mark.usefixtures("answers")
def test_a_table_and_json() -> None:
    shown = CliRunner().invoke(app, ["stats", "--url", "http://server"])
    assert shown.exit_code == 0
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["requests", "hit", "4", "80%"] in lines
    assert ["stored", "KV", "loaded", "file", "5.0", "MB", "100%"] in lines
    assert ["loading", "their", "KV", "4", "150.0", "200.0"] in lines
    told = json.loads(CliRunner().invoke(app, ["stats", "--url", "http://server", "--json"]).stdout)
    assert told == read("http://server", None)


def test_it_is_shown_anew(answers: list[httpx.Response], monkeypatch: pytest.MonkeyPatch) -> None:
    answers.append(httpx.Response(500))
    monkeypatch.setattr(stats_module, "EVERY_S", 0.0)
    shown = CliRunner().invoke(app, ["stats", "--url", "http://server", "--watch"])
    assert isinstance(shown.exception, EngineError)
    assert "answers 500" in str(shown.exception)
    assert shown.stdout.count("requests          hit") == 1


@pytest.mark.parametrize("status", [401, 403])
def test_another_key(answers: list[httpx.Response], status: int) -> None:
    answers[:] = [httpx.Response(status)]
    with pytest.raises(EngineError, match="wants the operator's key: give --key"):
        read("http://server", "wrong")


def test_nobody_answers() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 does not answer"):
        read("http://127.0.0.1:9", None)


def test_quantiles_of_a_histogram() -> None:
    inf = float("inf")
    assert quantile({1.0: 0, inf: 0}, 0.5) is None
    assert quantile({1.0: 4, inf: 4}, 0.5) == 0.5
    assert quantile({1.0: 1, 2.0: 1, inf: 4}, 0.9) == 2.0
    assert quantile({1.0: 2, 3.0: 4, inf: 4}, 0.75) == 2.0


def test_of_a_running_server(server: Server) -> None:
    stats = read(server.base_url, server.operator_key)
    assert stats["vllm:time_to_first_token_seconds"].keys() >= {"count", "sum"}
    with pytest.raises(EngineError, match="operator's key"):
        read(server.base_url, server.tenant_key)


def test_an_engine_counts_the_same(engine: Engine, namespace: str) -> None:
    def moved(before: dict[str, Any], name: str, label: str) -> float:
        after = engine.stats()
        return float(after[name].get(label, 0) - before.get(name, {}).get(label, 0))

    (chunk,) = store_chunks(engine, [random_tokens(77, 90)], namespace=namespace)
    before = engine.stats()
    prompt = random_tokens(78, 5) + chunk.tokens + random_tokens(79, 5)
    report = blended(engine, prompt, namespace=namespace, ratio=0.2).report
    assert report.kv_cache == "hit"
    assert moved(before, "semkv_requests_total", "hit") == 1
    tokens = "semkv_prompt_tokens_total"
    assert moved(before, tokens, "recomputed") == report.recomputed_tokens == 18
    assert moved(before, tokens, "loaded") == 72
    assert moved(before, tokens, "computed") == 10
    assert moved(before, "semkv_loaded_bytes_total", "file") == report.file_bytes > 0
    assert moved(before, "semkv_load_seconds", "count") == 1
    assert moved(before, "semkv_load_seconds", "sum") == pytest.approx(report.load_ms / 1000)
