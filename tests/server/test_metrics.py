"""What `/metrics` says of reuse: each metric moves with its cause, in a running server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from semkv_rag.engine import Engine
from semkv_rag.store import KVStore
from tests.server.test_serve import QUESTION, client_of, put, report_of
from workbench.chunks import Tokens, random_tokens
from workbench.server import Server


def metrics(server: Server) -> dict[tuple[str, ...], float]:
    """Each sample of ours by its name and its own label."""
    answer = httpx.get(
        server.base_url.removesuffix("/v1") + "/metrics",
        headers={"Authorization": f"Bearer {server.operator_key}"},
    )
    assert answer.status_code == 200
    return {
        (
            one.name,
            *(v for k, v in one.labels.items() if k not in ("engine", "model_name", "le")),
        ): (one.value)
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
        if one.name.startswith("semkv_") and not one.name.endswith(("_bucket", "_created"))
    }


def moved(server: Server, ask: Callable[[], Any]) -> dict[tuple[str, ...], float]:
    """By how much each sample moves with a request; vLLM tells them a moment after the answer."""
    before = metrics(server)
    ask()
    until = time.monotonic() + 20
    while True:
        after = metrics(server)
        changes = {
            name: value - before.get(name, 0)
            for name, value in after.items()
            if value != before.get(name, 0)
        }
        if any(name[0] == "semkv_requests_total" for name in changes):
            return changes
        assert time.monotonic() < until, "no request was counted"
        time.sleep(0.05)


def asking(server: Server, prompt: Tokens, **options: Any) -> Callable[[], Any]:
    body = {"ignore_eos": True, "kv_transfer_params": {"semkv": options}}
    return lambda: client_of(server).completions.create(
        model=server.model, prompt=prompt, temperature=0, max_tokens=2, extra_body=body
    )


def test_a_blend_is_counted(engine: Engine, server: Server) -> None:
    stored = put(engine, server, [random_tokens(s, 90) for s in (311, 312)], "default")
    prompt = stored[1].tokens + stored[0].tokens + QUESTION
    reports = []
    ask = asking(server, prompt, ratio=0.5, selector="chunk_head")
    changes = moved(server, lambda: reports.append(report_of(ask())))
    (report,) = reports
    assert (report.exact_tokens, report.reused_tokens, report.recomputed_tokens) == (90, 90, 45)
    assert changes["semkv_requests_total", "hit"] == 1
    assert changes["semkv_prompt_tokens_total", "loaded"] == 135
    assert changes["semkv_prompt_tokens_total", "recomputed"] == 45
    assert changes["semkv_prompt_tokens_total", "computed"] == len(QUESTION)
    assert changes["semkv_loaded_bytes_total", "file"] == report.file_bytes > 0
    for time_of, ms in (("match", report.match_ms), ("load", report.load_ms)):
        assert changes[f"semkv_{time_of}_seconds_count",] == 1
        assert abs(changes[f"semkv_{time_of}_seconds_sum",] - ms / 1000) < 1e-6
    assert changes["semkv_blend_seconds_count",] == 1
    assert not any(name[0] == "semkv_faults_total" for name in changes)


def test_the_prefix_cache_s_tokens_are_cached(server: Server) -> None:
    prompt = random_tokens(313, 96)
    moved(server, asking(server, prompt))
    changes = moved(server, asking(server, prompt))
    assert changes["semkv_requests_total", "miss"] == 1
    assert changes["semkv_prompt_tokens_total", "cached"] == 64
    assert changes["semkv_prompt_tokens_total", "computed"] == 32


def test_little_of_a_long_prompt_is_partial(engine: Engine, server: Server) -> None:
    (stored,) = put(engine, server, [random_tokens(314, 64)], "default")
    prompt = random_tokens(315, 200) + stored.tokens + QUESTION
    assert moved(server, asking(server, prompt))["semkv_requests_total", "partial"] == 1


def test_reuse_that_is_switched_off_is_skipped(server: Server) -> None:
    changes = moved(server, asking(server, random_tokens(316, 40), enabled=False))
    assert changes["semkv_requests_total", "skip"] == 1
    assert changes["semkv_prompt_tokens_total", "computed"] == 40


def test_a_damaged_file_is_a_fault(engine: Engine, server: Server) -> None:
    (stored,) = put(engine, server, [random_tokens(317, 90)], "default")
    with KVStore(server.store, read_only=True) as store:
        path = store.path(engine.fingerprint, "default", stored.id)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    changes = moved(server, asking(server, random_tokens(318, 5) + stored.tokens + QUESTION))
    assert changes["semkv_requests_total", "miss"] == 1
    assert changes["semkv_faults_total", "chunk"] == 1
    assert changes["semkv_prompt_tokens_total", "computed"] == 5 + 90 + len(QUESTION)
    assert ("semkv_prompt_tokens_total", "loaded") not in changes


def test_no_label_comes_from_a_request(server: Server) -> None:
    names = {name for name in metrics(server) if len(name) > 1}
    assert {label for _, *labels in names for label in labels} <= {
        *("hit", "partial", "miss", "skip"),
        *("cached", "loaded", "recomputed", "computed"),
        *("memory", "file"),
        *("index", "chunk", "not_finite", "internal"),
    }
