"""LoRA adapters: each has chunks of its own, and blends compute each request's rows with its adapter."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.adapter import Adapter, adapter_digest
from semkv_rag.corpus import precompute_texts
from semkv_rag.corpus.capture import CaptureItem, Capturer
from semkv_rag.engine import Completion, Engine
from semkv_rag.engine.launch import adapter_fingerprint
from semkv_rag.errors import OptionError
from semkv_rag.llm import LocalBackend
from semkv_rag.prompt_cache import PromptCacheOptions
from semkv_rag.quality.measuring import measure
from semkv_rag.quality.questions import Question
from semkv_rag.quality.settings import grid
from semkv_rag.reuse import ReusePlan, Span, token_array
from semkv_rag.store import chunk_id
from tests.connector.pairs import Pair, assert_logprobs, plan_of
from tests.reference import ReferenceModel, masked
from workbench.adapters import build_adapter, merge
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import Tokens, random_tokens, store_chunks
from workbench.engines import Engines, a_core_each
from workbench.inside import picked_positions
from workbench.settings import ENGINE_ARGS
from workbench.tiered import tiered

OTHER = random_tokens(899, 30)
PREFIX = random_tokens(898, 21)
OWNERS = ("base", "a", "b")
TEXT = "the store keeps the keys and values of each chunk layer by layer in one file. " * 3
LORA = {"enable_lora": True, "max_lora_rank": 8}
LOOKING: dict[str, dict[str, object]] = {
    "base": {"selector": "sensitivity_attention", "ratio": 0.15},
    "a": {"selector": "sensitivity_attention", "ratio": 0.3},
    "b": {"selector": "kv_deviation", "ratio": 0.15},
}


@dataclass(kw_only=True)
class Owned(Pair):
    """The model, or the model with an adapter, in an engine that has all of them.

    Attributes:
        lora: None for the model alone.
        only: a chunk that no other owner has stored.
    """

    lora: LoRARequest | None
    only: Tokens

    def prompt(self) -> tuple[Tokens, list[Span]]:
        """An exact chunk behind the prefix, and two others with text around them."""
        exact = self.chunks[2]
        spans = [Span(exact.id, 0, len(PREFIX), len(exact.tokens), base=len(PREFIX), exact=True)]
        tokens = PREFIX + exact.tokens
        for chunk in (self.chunks[1], self.chunks[0]):
            tokens = tokens + random_tokens(901 + len(spans), 3)
            spans.append(chunk.at(len(tokens)))
            tokens = tokens + chunk.tokens
        return tokens + random_tokens(910, 9), spans

    def plan(self, spans: list[Span], tokens: Tokens, **options: object) -> ReusePlan:
        return plan_of(tokens, spans, ReuseOptions(**options))  # type: ignore[arg-type]

    def assert_blended(self, answer: Completion, options: dict[str, object]) -> None:
        """As the reference, whose weights have the adapter merged in, blends it."""
        tokens, spans = self.prompt()
        plan = self.plan(spans, tokens, **options)
        assert answer.report.reused_tokens == plan.reused_tokens > 100
        expected = self.reference.blend(tokens, plan, self.stored)
        adapter = None
        if self.lora is not None:
            adapter = Adapter(adapter_digest(self.lora.lora_path), self.lora)
        picked = picked_positions(self.engine, plan, tokens, adapter)
        assert picked == list(expected.picked)
        assert_logprobs(answer, expected.logprobs)


@pytest.fixture(scope="module")
def base(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of other ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": build_adapter(base, folder / "a", seed=1, rank=4),
        "b": build_adapter(base, folder / "b", seed=2, rank=8),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, id="two in a forward"),
        pytest.param(1, id="one in a forward", marks=pytest.mark.soak),
    ],
)
def owned(
    request: pytest.FixtureRequest,
    engines: Engines,
    base: Path,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Owned]]:
    models = {"base": base}
    for name, folder in folders.items():
        models[name] = merge(base, folder, tmp_path_factory.mktemp("merged") / name)
    with engines.own(base, max_loras=request.param, **LORA) as engine:
        assert engine.gate.servable, engine.gate.reason
        yield {
            name: _owned(engine, name, number, models[name], folders.get(name))
            for number, name in enumerate(OWNERS)
        }


def _owned(engine: Engine, name: str, number: int, model: Path, folder: Path | None) -> Owned:
    lora = None if folder is None else LoRARequest(name, number, str(folder))
    capturer = engine if lora is None else engine.with_adapter(lora)
    texts = [random_tokens(seed, 70 + 7 * seed) for seed in range(3)]
    only = random_tokens(50 + number, 80)
    chunks = store_chunks(capturer, texts[:2], namespace="default", reference=OTHER)
    chunks += store_chunks(capturer, texts[2:], namespace="default", context=PREFIX)
    store_chunks(capturer, [only], namespace="default")
    reference = ReferenceModel(model)
    stored = {chunk.id: reference.compared([], chunk.tokens, OTHER) for chunk in chunks[:2]}
    stored[chunks[2].id] = reference.stored(PREFIX, chunks[2].tokens)
    return Owned(engine, reference, chunks, stored, lora=lora, only=only)


@pytest.mark.parametrize("name", OWNERS)
def test_recomputing_everything_is_plain(owned: dict[str, Owned], name: str) -> None:
    one = owned[name]
    tokens, _ = one.prompt()
    expected = plain(one.engine, tokens, one.lora)
    assert_logprobs(expected, one.reference.logprobs(tokens))
    for options in ({"ratio": 1.0}, {"selector": "all"}):
        one.engine.reset_prefix_cache()
        answer = blended(one.engine, tokens, one.lora, **options)
        assert answer.report.recomputed_tokens == answer.report.reused_tokens > 100
        assert answer.report.exact_tokens == len(one.chunks[2].tokens)
        assert_same(answer, expected)


@pytest.mark.parametrize("name", OWNERS)
def test_none_is_block_diagonal_attention(owned: dict[str, Owned], name: str) -> None:
    one = owned[name]
    tokens, spans = one.prompt()
    one.engine.reset_prefix_cache()
    answer = blended(one.engine, tokens, one.lora, selector="none")
    plan = one.plan(spans, tokens, selector="none")
    assert_logprobs(answer, masked(one.reference, tokens, plan, one.stored))
    for other in owned.values():  # else none of this would say anything
        difference = (other.reference.logprobs(tokens) - one.reference.logprobs(tokens)).abs().max()
        assert (difference > 1.0) == (other is not one)


async def test_all_at_once_are_as_alone(owned: dict[str, Owned]) -> None:
    """Twice each: the second ones are given away by nobody's blend but their own."""
    engine = owned["base"].engine
    engine.reset_prefix_cache()
    answers = await asyncio.gather(
        *(
            engine.agenerate(
                one.prompt()[0],
                sampling=SAMPLING,
                reuse=ReuseOptions(**LOOKING[name]),  # type: ignore[arg-type]
                lora_request=one.lora,
            )
            for name, one in [*owned.items()] * 2
        )
    )
    for answer, (name, one) in zip(answers, [*owned.items()] * 2, strict=True):
        one.assert_blended(answer, LOOKING[name])
        engine.reset_prefix_cache()
        alone = blended(engine, one.prompt()[0], one.lora, **LOOKING[name])
        assert_same(answer, alone)


def test_no_owner_finds_the_chunks_of_another(owned: dict[str, Owned]) -> None:
    for one in owned.values():
        prompt = random_tokens(70, 5) + one.only + random_tokens(71, 5)
        for other in owned.values():
            answer = blended(one.engine, prompt, other.lora, ratio=0.15)
            if other is one:
                assert answer.report.reused_tokens == len(one.only)
            else:
                assert answer.report.reason == "no stored chunk was found in the prompt"
                assert_same(answer, plain(one.engine, prompt, other.lora))


def test_the_prefix_cache_stays_exact(owned: dict[str, Owned]) -> None:
    expected = {name: plain(one.engine, one.prompt()[0], one.lora) for name, one in owned.items()}
    owned["base"].engine.reset_prefix_cache()
    for one in owned.values():
        for options in (*LOOKING.values(), {"selector": "none"}):
            blended(one.engine, one.prompt()[0], one.lora, **options)
    for name, one in owned.items():
        ordinary = one.engine.generate(
            one.prompt()[0],
            sampling=SAMPLING,
            reuse=ReuseOptions(enabled=False),
            lora_request=one.lora,
        )
        assert len(PREFIX) < ordinary.report.cached_tokens <= one.prompt()[1][1].dst
        assert_same(ordinary, expected[name])
        again = blended(one.engine, one.prompt()[0], one.lora, **LOOKING[name])
        assert again.report.cached_tokens > one.prompt()[1][1].dst
        one.assert_blended(again, LOOKING[name])


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in passing"])
def test_a_whole_prompt_is_found_by_its_owner_alone(owned: dict[str, Owned], ahead: bool) -> None:
    engine = owned["base"].engine
    with tiered(engine, PromptCacheOptions(), {}) as tiering:
        for number, one in enumerate(owned.values()):
            prompt = random_tokens(75 + number + 10 * ahead, 60)
            if ahead:
                tiering.observe(prompt, "default", lora=one.lora)
            else:
                assert blended(engine, prompt, one.lora).report.kv_cache == "miss"
                tiering.settle()
            for other in owned.values():
                engine.reset_prefix_cache()
                answer = blended(engine, prompt, other.lora, ratio=1.0)
                assert answer.report.served_by == ("exact_text" if other is one else None)
                assert answer.report.kv_cache == ("hit" if other is one else "miss")
                assert_same(answer, plain(engine, prompt, other.lora))


def test_an_adapter_behind_the_frameworks_classes(
    owned: dict[str, Owned], folders: dict[str, Path]
) -> None:
    engine = owned["base"].engine
    backends = {name: LocalBackend(engine, str(folder)) for name, folder in folders.items()}
    backends["base"] = LocalBackend(engine)
    prompt, fields = f"{TEXT}\nwho?", {"temperature": 0, "max_tokens": 8}
    alone = engine.tokens_of(prompt)
    expected = {
        name: plain(engine, alone, one.lora, max_tokens=8).text for name, one in owned.items()
    }
    for stored, backend in backends.items():
        assert backend.store_texts([("one", [TEXT])]).failures == []
        for name, asked in backends.items():
            answers = [asked.answer(prompt, fields, {"ratio": 1.0})]
            *parts, last = asked.stream(prompt, fields, {"ratio": 1.0})
            answers.append(replace(last, text="".join(part.text for part in parts)))
            for answer in answers:
                assert answer.report is not None
                assert answer.report["kv_cache"] == ("hit" if name == stored else "miss")
                assert answer.text == expected[name]
        assert backend.forget(["one"]) == 1
        engine.reset_prefix_cache()
    assert len({backend.fingerprint() for backend in backends.values()}) == len(backends)


def test_two_adapters_of_one_name_are_told_apart(
    owned: dict[str, Owned], folders: dict[str, Path]
) -> None:
    engine, asked = owned["base"].engine, {"fields": {"max_tokens": 1}}
    a, b = (LoRARequest("same", 20 + n, str(folders[name])) for n, name in enumerate("ab"))
    assert engine.respond("who?", lora_request=a, **asked)["model"] == "same"
    with pytest.raises(OptionError, match="two LoRA adapters are named same"):
        engine.respond("who?", lora_request=b, **asked)


def test_the_quality_of_an_adapter(owned: dict[str, Owned]) -> None:
    engine = owned["base"].engine
    question = Question("one", prompt=f"so {TEXT}\nwho?")
    settings = grid((), (), namespace="quality")
    lora = owned["a"].lora
    assert lora is not None
    precompute_texts(engine.with_adapter(lora), [("t", [TEXT])], namespace="quality")
    told = {
        name: measure(engine, [question], settings=settings, max_tokens=4, lora_request=one.lora)
        for name, one in owned.items()
    }
    assert [told[name].lora for name in OWNERS] == [None, "a", "b"]
    assert [len(told[name].not_reused) for name in OWNERS] == [1, 0, 1]
    assert told["a"].full is not None
    (answer,) = told["a"].full_answers
    prompt = engine.tokens_of(f"so {TEXT}\nwho?")
    assert answer.text == plain(engine, prompt, lora).text
    exact = next(line for line in told["a"].lines if line.name == "exact")
    assert exact.agreement.mean == 1.0


def test_other_weights_under_the_same_name(
    owned: dict[str, Owned], folders: dict[str, Path], tmp_path: Path
) -> None:
    """In the same folder, under the same name and number: neither chunks nor cached blocks are found."""
    engine, folder = owned["base"].engine, tmp_path / "replaced"
    shutil.copytree(folders["a"], folder)
    lora = LoRARequest("replaced", 7, str(folder))
    tokens, _ = owned["a"].prompt()
    # The same weights as `a`, whatever they are called: its chunks.
    assert blended(engine, tokens, lora, ratio=1.0).report.reused_tokens > 100
    assert_same(blended(engine, tokens, lora, ratio=1.0), plain(engine, tokens, lora))
    capturer = engine.with_adapter(lora)
    shutil.copytree(folders["b"], folder, dirs_exist_ok=True)

    # vLLM has the former weights still: what it computes is neither one's for sure.
    answer = blended(engine, tokens, lora, ratio=1.0)
    assert answer.report.kv_cache == "skip"
    assert answer.report.reason is not None
    assert "changed since it was loaded" in answer.report.reason
    assert "other weights" in capture_error(engine.with_adapter(lora))

    anew = LoRARequest("replaced", 7, str(folder), load_inplace=True)
    expected = plain(engine, tokens, owned["b"].lora)
    for _ in range(2):
        answer = blended(engine, tokens, anew, ratio=1.0)
        assert answer.report.reused_tokens > 100  # the chunks of `b`
        assert_same(answer, expected)
    assert "other weights" in capture_error(capturer)
    assert capture_error(engine.with_adapter(anew)) == "none"


def capture_error(capturer: Capturer) -> str:
    tokens, before = token_array(random_tokens(80, 60)), token_array([])
    identity = chunk_id(capturer.fingerprint, "default", before, tokens)
    item = CaptureItem(identity, "default", "document", tokens, before)
    (result,) = capturer.capture([item])
    return result.error or "none"


def test_what_is_no_adapter_is_refused(owned: dict[str, Owned], tmp_path: Path) -> None:
    engine, (tokens, _) = owned["base"].engine, owned["base"].prompt()
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        lora = LoRARequest("wrong", 9, str(folder))
        with pytest.raises(OptionError, match="is no LoRA adapter"):
            engine.with_adapter(lora)
        with pytest.raises(OptionError, match="vLLM does not load the LoRA adapter wrong"):
            engine.generate(tokens, lora_request=lora)
    assert blended(engine, tokens, ratio=1.0).report.kv_cache == "hit"


@pytest.mark.soak
def test_what_no_rank_loads_stops_no_engine(
    base: Path, folders: dict[str, Path], engines: Engines, tmp_path: Path
) -> None:
    prompt = random_tokens(5, 90)
    (tmp_path / "empty").mkdir()
    with a_core_each(), engines.own(base, tensor_parallel_size=2, **LORA) as engine:
        wrong = LoRARequest("wrong", 9, str(tmp_path / "empty"))
        with pytest.raises(OptionError, match="vLLM does not load the LoRA adapter wrong"):
            engine.generate(prompt, lora_request=wrong)
        # The number is free again, and the engine answers.
        name, folder = next(iter(folders.items()))
        answer = plain(engine, prompt, LoRARequest(name, 9, str(folder)))
        assert answer.token_ids != plain(engine, prompt).token_ids


def test_an_engine_without_adapters_says_what_to_pass(
    engine: Engine, reader: Path, tmp_path: Path
) -> None:
    folder = str(build_adapter(reader, tmp_path / "adapter", seed=1))
    with pytest.raises(OptionError, match="enable_lora=True"):
        engine.with_adapter(LoRARequest("one", 1, folder))
    with pytest.raises(OptionError, match="enable_lora=True"):
        adapter_fingerprint(str(reader), folder, **ENGINE_ARGS)
