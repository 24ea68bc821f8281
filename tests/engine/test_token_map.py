"""What a token map says is what the engine did."""

from __future__ import annotations

import httpx
import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import precompute_texts
from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport
from workbench.answers import SAMPLING, assert_same
from workbench.chunks import random_tokens, store_chunks
from workbench.server import Server

PREFIX = "answer by these passages :"
CHUNKS = [
    "the mascot of Mir bol is a red fox . the team plays on the old field near the river .",
    "the museum of Tal ven opens at nine . its first room shows the maps of the old town .",
]
PROMPT = f"{PREFIX} {CHUNKS[1]} {CHUNKS[0]} which mascot does Mir bol have ?"


def test_each_token_is_what_the_report_counts(engine: Engine, namespace: str) -> None:
    precompute_texts(engine, [("clubs", CHUNKS)], namespace=namespace, prefix=PREFIX)
    options = {"namespace": namespace, "ratio": 0.3}
    engine.reset_prefix_cache()
    shown = engine.generate(
        PROMPT, sampling=SAMPLING, reuse=ReuseOptions(**options, token_map=True)
    )
    engine.reset_prefix_cache()
    plain = engine.generate(PROMPT, sampling=SAMPLING, reuse=ReuseOptions(**options))
    assert plain.report.token_map is None
    assert_same(shown, plain)
    report, made = shown.report, shown.report.token_map
    assert made is not None
    tokens = engine.tokenizer(PROMPT).input_ids
    assert "".join(made.pieces) == engine.tokenizer.decode(tokens)
    counts = made.counts()
    assert counts["exact"] == report.exact_tokens > 0
    assert counts["recomputed"] == report.recomputed_tokens > 0
    assert counts["reused"] == report.reused_tokens - report.recomputed_tokens > 0
    assert sum(counts.values()) == report.prompt_tokens
    assert [span.chunk_id for span in made.spans] == list(report.chunk_ids)
    named = {span.source for span in made.spans}
    assert "clubs" in named
    assert all(span.stored_at is not None for span in made.spans)
    # The selector wanted those most that it picked.
    wanted = {True: [], False: []}  # type: dict[bool, list[int]]
    for span in made.spans:
        for at, score in enumerate(span.scores, span.begin):
            wanted[made.kinds()[at] == "recomputed"].append(int(score))
    assert min(wanted[True]) >= max(wanted[False])
    assert "clubs" in report.to_html()


def test_with_a_ratio_of_its_own_and_out_of_the_prefix_cache(
    engine: Engine, namespace: str
) -> None:
    chunks = store_chunks(
        engine, [random_tokens(seed, 90) for seed in (91, 92)], namespace=namespace
    )
    prompt = random_tokens(93, 5) + chunks[1].tokens + chunks[0].tokens + random_tokens(94, 6)
    options = ReuseOptions(
        namespace=namespace, ratio=0.2, selector="query_attention", token_map=True
    )
    engine.reset_prefix_cache()
    made = engine.generate(prompt, sampling=SAMPLING, reuse=options).report.token_map
    assert made is not None
    recomputed = [at for at, kind in enumerate(made.kinds()) if kind == "recomputed"]
    assert len(recomputed) == 36
    # Again, out of vLLM's prefix cache: what is known of the first time is not told.
    again = engine.generate(prompt, sampling=SAMPLING, reuse=options).report
    assert again.token_map is not None
    assert again.token_map.cached_tokens == again.cached_tokens > 0
    assert len(again.token_map.pieces) == len(prompt)


def test_over_http_and_in_its_own_namespace_only(server: Server) -> None:
    for key, name in ((server.api_key, "of-default"), (server.tenant_key, "of-tenant")):
        answer = httpx.post(
            server.base_url.removesuffix("/v1") + "/semkv/v1/precompute",
            json={"documents": [{"name": name, "chunks": CHUNKS}], "prefix": PREFIX},
            headers={"X-API-Key": key},
            timeout=120,
        )
        assert '"failures": []' in answer.text
        told = httpx.post(
            f"{server.base_url}/completions",
            json={
                "model": server.model,
                "prompt": PROMPT,
                "max_tokens": 2,
                "kv_transfer_params": {"semkv": {"token_map": True}},
            },
            headers={"X-API-Key": key},
            timeout=120,
        ).json()
        report = ReuseReport.from_mapping(told["kv_transfer_params"]["semkv"])
        assert report.kv_cache == "hit"
        assert report.token_map is not None
        assert {span.source for span in report.token_map.spans} - {None} == {name}


def test_no_answer_depends_on_who_looks_on(
    engine: Engine, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("looking on")

    precompute_texts(engine, [("clubs", CHUNKS)], namespace=namespace, prefix=PREFIX)
    assert engine._llm is not None
    monkeypatch.setattr(engine._llm.totals, "count", fail)
    monkeypatch.setattr("semkv_rag.engine.client.completed", fail)
    engine.reset_prefix_cache()
    options = ReuseOptions(namespace=namespace, token_map=True)
    answer = engine.generate(PROMPT, sampling=SAMPLING, reuse=options)
    assert answer.report.kv_cache == "hit"
    assert answer.report.token_map is None
    engine.reset_prefix_cache()
    reuse = ReuseOptions(namespace=namespace)
    assert_same(answer, engine.generate(PROMPT, sampling=SAMPLING, reuse=reuse))
