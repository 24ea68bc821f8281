"""Nothing that one tenant has had computed or stored reaches another, by whatever way it came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from semkv_rag.engine.caller import CALLER, Caller
from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.pairs import BLOCK, pairs, spill

FREE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiered(engines: Engines, reader: Path) -> Iterator[Engine]:
    with engines.own(
        reader, prompt_cache=PromptCacheOptions(capture_longer_than=3 * BLOCK)
    ) as engine:
        yield engine


def test_two_tenants_who_ask_alike(engine: Engine, namespace: str) -> None:
    for seed, who in enumerate((namespace, "default")):
        tenants = (who, "other of " + namespace)
        seen = spill(engine, tenants, list(pairs(seed, count=40)))
        assert seen.found == []
        assert seen.own > 40 * BLOCK / 4


def test_two_tenants_whose_prompts_are_stored(tiered: Engine, namespace: str) -> None:
    seen = spill(tiered, (namespace, "default"), list(pairs(seed=3, count=40)))
    assert seen.found == []
    assert seen.own > 40 * BLOCK / 4


def cached(engine: Engine, prompt: list[int], namespace: str) -> int:
    """Tokens found in the prefix cache by a request without reuse."""
    reuse = ReuseOptions(enabled=False, namespace=namespace)
    answer = engine.generate(prompt, sampling={**FREE, "max_tokens": 1}, reuse=reuse)
    return answer.report.cached_tokens


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 2])
def test_blocks_that_fill_up_while_an_answer_is_decoded(
    engine: Engine, namespace: str, length: int
) -> None:
    prompt = random_tokens(5000 + length, length)
    reuse = ReuseOptions(namespace=namespace)
    answer = engine.generate(prompt, sampling={**FREE, "max_tokens": 2 * BLOCK}, reuse=reuse)
    further = [*prompt, *answer.token_ids, 9, 10]
    assert cached(engine, further, "default") == 0
    assert cached(engine, further, "another of " + namespace) == 0
    assert cached(engine, further, namespace) >= 2 * BLOCK


def test_kv_behind_a_blend_is_the_blend_s_alone(engine: Engine) -> None:
    (chunk,) = store_chunks(engine, [random_tokens(991, 40)], namespace="default")
    prefix = random_tokens(992, BLOCK + 8)
    # The first inexact token stands in a block that is not full when the request comes.
    prompt = prefix + chunk.tokens[:18]
    assert len(prompt) < 2 * BLOCK
    reuse = ReuseOptions(selector="none")
    answer = engine.generate(prompt, sampling={**FREE, "max_tokens": 3 * BLOCK}, reuse=reuse)
    assert answer.report.reused_tokens > 0
    assert cached(engine, [*prompt, *answer.token_ids, 9, 10], "default") == BLOCK, "of the prefix"


def test_a_salt_of_a_client_s_own_is_kept_apart_too(engine: Engine, namespace: str) -> None:
    prompt = random_tokens(995, 3 * BLOCK)

    def ask(who: str, salt: str | None) -> int:
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        reuse = ReuseOptions(namespace=who)
        return engine.generate(
            given, sampling={**FREE, "max_tokens": 1}, reuse=reuse
        ).report.cached_tokens

    assert [ask(namespace, None), ask(namespace, "s"), ask("default", "s")] == [0, 0, 0]
    assert ask("default", None) == 0
    for who in (namespace, "default"):
        for salt in (None, "s"):
            assert ask(who, salt) == 2 * BLOCK


def test_a_model_that_is_served_plainly(engines: Engines, reader: Path) -> None:
    with engines.own(reader, store=None) as plain:

        def cached(prompt: list[int], who: str) -> int:
            async def ask() -> int:
                assert plain._llm is not None
                params = SamplingParams(temperature=0, max_tokens=2 * BLOCK, ignore_eos=True)
                token = CALLER.set(Caller(who))
                try:
                    found = 0
                    given = {"prompt_token_ids": prompt}
                    async for output in plain._llm.generate(given, params, f"{who}-{len(prompt)}"):
                        found = output.num_cached_tokens or found
                        said.extend(output.outputs[0].token_ids[len(said) :])
                    return found
                finally:
                    CALLER.reset(token)

            said: list[int] = []
            return plain._loop.call(ask())

        short, long = random_tokens(996, 5), random_tokens(997, 3 * BLOCK)
        assert [cached(long, who) for who in ("a", "b", "default")] == [0, 0, 0]
        assert [cached(long, who) for who in ("a", "b", "default")] == [2 * BLOCK] * 3
        answer = plain.generate(
            short, sampling={**FREE, "max_tokens": 2 * BLOCK}, reuse=ReuseOptions(namespace="a")
        )
        further = [*short, *answer.token_ids, 9]
        assert cached(further, "b") == 0
        assert cached(further, "default") == 0
        assert cached(further, "a") == 2 * BLOCK


def test_a_request_without_a_namespace_is_refused(engine: Engine) -> None:
    llm = engine._llm
    assert llm is not None

    async def ask(extra: dict[str, Any] | None) -> None:
        params = SamplingParams(max_tokens=1, extra_args=extra)
        async for _ in llm.generate({"prompt_token_ids": [9, 10]}, params, "nobody's"):
            pass

    for extra in (None, {}, {"kv_transfer_params": {"semkv": {}}}, {"kv_transfer_params": None}):
        with pytest.raises(OptionError, match="namespace"):
            engine._loop.call(ask(extra))
    assert not llm.output_processor.request_states, "nothing is kept of it"


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(engine: Engine) -> None:
    llm = engine._llm
    assert llm is not None

    async def ask() -> None:
        extra = {"kv_transfer_params": {"semkv": {"namespace": "a"}}, "text": "\ud800"}
        params = SamplingParams(max_tokens=1, extra_args=extra)
        async for _ in llm.generate({"prompt_token_ids": [9, 10]}, params, "half a pair"):
            pass

    for _ in range(2):
        with pytest.raises(OptionError, match="vLLM cannot take the request"):
            engine._loop.call(ask())
        assert not llm.output_processor.request_states
        assert not llm.output_processor.external_req_ids


@pytest.mark.parametrize(
    "transfer",
    ["x", 1, [1], {"semkv": "x"}, {"semkv": {"capture": {}}}, {"semkv": {"namespace": "b"}}],
    ids=str,
)
def test_what_a_client_may_not_say(engine: Engine, transfer: Any) -> None:
    llm = engine._llm
    assert llm is not None

    async def ask() -> None:
        CALLER.set(Caller("a"))
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": transfer})
        async for _ in llm.generate({"prompt_token_ids": [9, 10]}, params, "a client's"):
            pass

    with pytest.raises(OptionError):
        engine._loop.call(ask())
    assert engine.generate([9, 10], sampling={**FREE, "max_tokens": 1}).token_ids
