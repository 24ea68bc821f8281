"""What `/metrics` says of reuse: each metric moves with its cause, in a running server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from semkv_rag.engine import Engine
from semkv_rag.store import KVStore, Limit
from tests.server.test_serve import QUESTION, client_of, put, report_of
from workbench.chunks import Tokens, random_tokens
from workbench.server import Server


def samples(server: Server) -> list[Sample]:
    """All that `/metrics` says."""
    answer = httpx.get(
        server.base_url.removesuffix("/v1") + "/metrics",
        headers={"Authorization": f"Bearer {server.operator_key}"},
        timeout=60,
    )
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return [one for family in families for one in family.samples]


OF_VLLM = (
    "vllm:external_prefix_cache_",
    "vllm:prefix_cache_",
    "vllm:prompt_tokens_by_source",
    "vllm:time_to_first_token_seconds",
)


def metrics(server: Server) -> dict[tuple[str, ...], float]:
    """Each sample of ours, and of vLLM's that show reuse, by its name and its own label."""
    return {
        (
            one.name,
            *(v for k, v in sorted(one.labels.items()) if k not in ("engine", "model_name", "le")),
        ): (one.value)
        for one in samples(server)
        if one.name.startswith(("semkv_", *OF_VLLM))
        and not one.name.endswith(("_bucket", "_created"))
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
    assert changes["vllm:external_prefix_cache_queries_total",] == len(prompt)
    assert changes["vllm:external_prefix_cache_hits_total",] == 180
    assert changes["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] == 180
    assert changes["vllm:time_to_first_token_seconds_count",] == 1


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
    assert changes["vllm:prefix_cache_hits_total",] == 64
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

    def ask_until_it_is_a_donor() -> None:  # a moment after its KV was written
        while report_of(asking(server, prompt)()).served_by != "exact_text":
            assert time.monotonic() < until
            time.sleep(0.1)

    second = moved(server, ask_until_it_is_a_donor)
    assert second["semkv_prompt_cache_requests_total", "hit", "exact_text"] == 1


def precompute(server: Server, key: str, name: str, text: str) -> dict[str, Any]:
    """Have the server store a text; what it says of the run."""
    url = server.base_url.removesuffix("/v1") + "/semkv/v1/precompute"
    body = {"documents": [{"name": name, "chunks": [text]}], "context": ["prefix"]}
    answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120)
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))["result"]
    return result


def test_what_makes_room_was_evicted_and_a_capture_is_no_request(server: Server) -> None:
    key, namespace = next(iter(server.further.items()))
    text = "The harbour of Ver lok has a crane and a lamp ."

    def store_two() -> None:
        first = precompute(server, key, "first", text)
        with KVStore(server.store) as store:
            store.lifecycle.set_limit(Limit(namespace, max_bytes=first["bytes"] * 3 // 2))
        assert precompute(server, key, "second", f"{text} {text[:9]}")["chunks_captured"] == 1
        asking(server, random_tokens(328, 30))()

    changes = moved(server, store_two)
    assert changes["semkv_evicted_total",] == 1
    assert changes["semkv_captures_total", "kept"] >= 2
    assert changes["semkv_requests_total", "miss"] == 1
    assert ("semkv_requests_total", "skip") not in changes
    assert changes["semkv_prompt_tokens_total", "computed"] == 30


def test_a_capture_that_cannot_be_written(engine: Engine, server: Server) -> None:
    key, namespace = list(server.further.items())[1]
    with KVStore(server.store) as store:
        folder = store.path(engine.fingerprint, namespace, "00" * 32).parents[1]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file stands where the namespace's folder would be")
    before = metrics(server)
    result = precompute(server, key, "a", "The harbour of Ver lok has a crane and a lamp .")
    folder.unlink()
    assert "could not be written" in result["failures"][0]["reason"]
    failed = ("semkv_captures_total", "failed")
    assert metrics(server)[failed] == before.get(failed, 0) + 1


def test_a_capture_that_is_given_up(engine: Engine, server: Server) -> None:
    """Behind a blend the prompt's KV is not its own."""
    (stored,) = put(engine, server, [random_tokens(329, 90)], "default")
    prompt = random_tokens(330, 5) + stored.tokens + random_tokens(331, server.captures_beyond)
    changes = moved(server, asking(server, prompt))
    assert changes["semkv_captures_total", "dropped"] == 1


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
    names = {name for name in metrics(server) if name[0].startswith("semkv_") and len(name) > 1}
    assert {label for _, *labels in names for label in labels} <= {
        *("hit", "partial", "miss", "skip"),
        *("cached", "loaded", "recomputed", "computed"),
        *("memory", "file", "object"),
        *("index", "chunk", "not_finite", "internal"),
        *("off", "request", "model", "store", "no_chunk", "slower", "no_room", "fault"),
        *("kept", "failed", "dropped"),
        *("exact_text", "semantic_text", "embedding:prompt", "embedding:vision", "fusion"),
    }


@pytest.mark.parametrize("tenants", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_tenants_have_no_series_of_their_own(server: Server, tenants: int) -> None:
    keys = dict(list(server.further.items())[:tenants])
    assert len(keys) == tenants

    # Requests wait here, not in httpx's pool: the pool goes through all that wait with each answer. A
    # thousand keep it so busy that the server closes its connections as idle.
    at_once = asyncio.Semaphore(32)

    async def ask_all() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            answers = await asyncio.gather(*(ask(client, key) for key in keys))
        assert {answer.status_code for answer in answers} == {200}

    async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
        body = {"model": server.model, "prompt": [9, 10, 11], "max_tokens": 1}
        headers = {"Authorization": f"Bearer {key}"}
        async with at_once:
            return await client.post(f"{server.base_url}/completions", json=body, headers=headers)

    moved(server, asking(server, [9, 10, 11]))
    before, misses = samples(server), ("semkv_requests_total", "miss")
    expected = metrics(server)[misses] + tenants
    asyncio.run(ask_all())
    until = time.monotonic() + 20
    while metrics(server)[misses] < expected:
        assert time.monotonic() < until
        time.sleep(0.1)
    shown = samples(server)
    assert len(shown) < min(2000, len(before) + tenants)
    named = {value for one in shown for value in one.labels.values()}
    assert not named & {*keys, *keys.values()}
