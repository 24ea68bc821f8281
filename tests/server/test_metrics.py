"""What `/metrics` says of reuse: each metric moves with its cause, in a running server."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
            *(v for k, v in sorted(one.labels.items()) if k not in ("engine", "model_name", "le")),
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


def asking(server: Server, prompt: Tokens, *, tokens: int = 2, **options: Any) -> Callable[[], Any]:
    body = {"ignore_eos": True, "kv_transfer_params": {"semkv": options}}
    return lambda: client_of(server).completions.create(
        model=server.model, prompt=prompt, temperature=0, max_tokens=tokens, extra_body=body
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
    for time_of in ("blend", "recompute"):
        assert changes[f"semkv_{time_of}_seconds_count",] == 1
    assert ("semkv_pick_seconds_count",) not in changes, "it picks without a look at the KV"
    assert ("semkv_plain_requests_total", "no_chunk") not in changes
    assert not any(name[0] == "semkv_faults_total" for name in changes)


def test_the_parts_of_a_blend_that_asks(engine: Engine, server: Server) -> None:
    stored = put(engine, server, [random_tokens(s, 90) for s in (325, 326)], "default")
    prompt = stored[1].tokens + stored[0].tokens + QUESTION
    changes = moved(server, asking(server, prompt, ratio=0.5))
    assert changes["semkv_pick_seconds_count",] == changes["semkv_recompute_seconds_count",] == 1
    parts = changes["semkv_pick_seconds_sum",] + changes["semkv_recompute_seconds_sum",]
    assert abs(parts - changes["semkv_blend_seconds_sum",]) < 0.001


def test_the_prefix_cache_s_tokens_are_cached(server: Server) -> None:
    prompt = random_tokens(313, 96)
    moved(server, asking(server, prompt))
    changes = moved(server, asking(server, prompt))
    assert changes["semkv_requests_total", "miss"] == 1
    assert changes["semkv_plain_requests_total", "no_chunk"] == 1
    assert changes["semkv_prompt_tokens_total", "cached"] == 64
    assert changes["semkv_prompt_tokens_total", "computed"] == 32


def test_little_of_a_long_prompt_is_partial(engine: Engine, server: Server) -> None:
    (stored,) = put(engine, server, [random_tokens(314, 64)], "default")
    prompt = random_tokens(315, 200) + stored.tokens + QUESTION
    assert moved(server, asking(server, prompt))["semkv_requests_total", "partial"] == 1


def test_reuse_that_is_switched_off_is_skipped(server: Server) -> None:
    changes = moved(server, asking(server, random_tokens(316, 40), enabled=False))
    assert changes["semkv_requests_total", "skip"] == 1
    assert changes["semkv_plain_requests_total", "off"] == 1
    assert changes["semkv_prompt_tokens_total", "computed"] == 40


def test_a_request_that_cannot_be_served_with_reuse(server: Server) -> None:
    body = {
        "model": server.model,
        "prompt": random_tokens(319, 40),
        "max_tokens": 1,
        "prompt_logprobs": 0,  # for these vLLM computes all of the prompt
    }
    headers = {"Authorization": f"Bearer {server.api_key}"}

    def ask() -> None:
        answer = httpx.post(
            f"{server.base_url}/completions", json=body, headers=headers, timeout=120
        )
        assert answer.status_code == 200

    assert moved(server, ask)["semkv_plain_requests_total", "request"] == 1


def test_what_a_blend_adds_to_others_steps(engine: Engine, server: Server) -> None:
    stored = put(engine, server, [random_tokens(s, 90) for s in (320, 321)], "default")
    others = asking(server, random_tokens(322, 30), tokens=100, enabled=False)
    stalls = ("semkv_stall_seconds_count",)
    until = time.monotonic() + 60
    before = metrics(server)
    number = 0
    with ThreadPoolExecutor(4) as pool:
        while metrics(server).get(stalls, 0) == before.get(stalls, 0):
            assert time.monotonic() < until
            number += 1  # another prompt each time: no cached block of a blend
            prompt = random_tokens(400 + number, 5) + stored[1].tokens + stored[0].tokens + QUESTION
            beside = [pool.submit(others) for _ in range(3)]
            asking(server, prompt, ratio=0.9, selector="chunk_head")()
            for one in beside:
                one.result()


def test_the_store_is_counted(engine: Engine, server: Server) -> None:
    put(engine, server, [random_tokens(327, 90)], "default")
    before = counted(server, lambda told: told["semkv_store_chunks",] > 0)
    put(engine, server, [random_tokens(323, 90)], "default")
    after = counted(
        server, lambda told: told["semkv_store_chunks",] > before["semkv_store_chunks",]
    )
    assert after["semkv_store_bytes",] > before["semkv_store_bytes",] > 0
    assert after["semkv_servable",] == 1


def counted(
    server: Server, ready: Callable[[dict[tuple[str, ...], float]], bool]
) -> dict[tuple[str, ...], float]:
    """The metrics once the store was counted, and is as wanted; that is done every ten seconds."""
    until = time.monotonic() + 60
    while True:
        told = metrics(server)
        if ("semkv_store_chunks",) in told and ready(told):
            return told
        assert time.monotonic() < until
        time.sleep(0.2)


def test_the_prompt_cache_and_captures(server: Server) -> None:
    prompt = random_tokens(324, server.captures_beyond + 20)
    before = metrics(server)
    first = moved(server, asking(server, prompt))
    assert first["semkv_prompt_cache_requests_total", "miss", "exact_text"] == 1
    kept = ("semkv_captures_total", "kept")
    until = time.monotonic() + 60
    while metrics(server).get(kept, 0) == before.get(kept, 0):
        assert time.monotonic() < until
        time.sleep(0.1)
    second = moved(server, asking(server, prompt))
    assert second["semkv_prompt_cache_requests_total", "hit", "exact_text"] == 1


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
    assert changes["semkv_plain_requests_total", "fault"] == 1
    assert changes["semkv_prompt_tokens_total", "computed"] == 5 + 90 + len(QUESTION)
    assert ("semkv_prompt_tokens_total", "loaded") not in changes


def test_no_label_comes_from_a_request(server: Server) -> None:
    names = {name for name in metrics(server) if len(name) > 1}
    assert {label for _, *labels in names for label in labels} <= {
        *("hit", "partial", "miss", "skip"),
        *("cached", "loaded", "recomputed", "computed"),
        *("memory", "file"),
        *("index", "chunk", "not_finite", "internal"),
        *("off", "request", "model", "store", "no_chunk", "slower", "fault"),
        *("kept", "failed", "dropped"),
        *("exact_text", "semantic_text", "embedding:prompt", "embedding:vision", "fusion"),
    }
