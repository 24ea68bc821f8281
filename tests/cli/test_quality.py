"""`semkv quality` and `measure` on the reader, documents and questions."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import semkv_rag.engine
from semkv_rag.config import PRESETS, ReuseOptions
from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine
from semkv_rag.errors import OptionError
from semkv_rag.quality import Question, Template, grid, measure, read_questions
from semkv_rag.quality.codecs import codec_settings, copies
from semkv_rag.quality.result import QualityResult
from semkv_rag.quality.settings import AS_STORED
from tests.cli.conftest import Semkv
from workbench.settings import READER

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = EXAMPLES / "corpus" / "questions.json"
# The one form of prompt that the reader knows.
TEMPLATE = Template("{context} Question : {question} Answer :")
NAMESPACE = "quality"


@pytest.fixture(scope="module")
def corpus(engine: Engine) -> str:
    """The namespace with the documents of `examples/corpus`."""
    precompute(engine, [EXAMPLES / "corpus"], chunk_tokens=32, namespace=NAMESPACE)
    return NAMESPACE


@pytest.fixture(scope="module")
def crossing() -> list[Question]:
    """Questions whose answers need another chunk, so that reuse can go wrong."""
    cross = [entry["cross"] for entry in json.loads(QUESTIONS.read_text())]
    questions = read_questions(QUESTIONS)
    return [one for one, needed in zip(questions, cross, strict=True) if needed][:10]


@pytest.fixture(scope="module")
def result(engine: Engine, corpus: str, crossing: list[Question]) -> QualityResult:
    settings = grid(["query_attention"], [0.07], namespace=corpus)
    return measure(engine, crossing, settings=settings, template=TEMPLATE, max_tokens=8)


def test_what_is_compared_and_advised(result: QualityResult, crossing: list[Question]) -> None:
    assert result.full is not None and result.recommendation is not None
    assert result.full.questions == len(crossing) and not result.failed and not result.not_reused
    lines = {line.name: line for line in result.lines}
    assert set(lines) == {AS_STORED, *PRESETS, "query_attention 7 %"}
    assert result.full.f1 is not None and result.full.f1 > 0.8
    exact = lines["exact"]
    assert (exact.agreement.mean, exact.answers_equal.mean, exact.f1) == (1, 1, result.full.f1)
    assert exact.kl.mean < 1e-4 and exact.charged_ratio == exact.recomputed == 1
    stored = lines[AS_STORED]
    assert stored.agreement.mean < 1 and stored.recomputed == 0 and stored.charged_ratio < 0.1
    assert stored.kl.mean > 0.01
    picked = lines["query_attention 7 %"]
    assert 0.07 < picked.charged_ratio < 1 and picked.recomputed == pytest.approx(0.07, abs=0.01)
    # Advice is a setting that is close enough, and the cheapest of them.
    advised = result.recommendation
    chosen = next(
        line
        for line in result.lines
        if (line.selector, line.ratio) == (advised.selector, advised.ratio)
    )
    assert (
        chosen.agreement.mean >= 0.98 and str(round(100 * chosen.agreement.mean)) in advised.reason
    )
    assert any("10 questions are few" in text for text in result.unknown)
    assert any("not by your retriever" in text for text in result.unknown)
    assert json.loads(json.dumps(result.to_mapping()))["lines"][0]["name"] == AS_STORED


def test_no_setting_is_answered_out_of_another_one_s_cache(
    engine: Engine,
    corpus: str,
    crossing: list[Question],
    result: QualityResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In another order, and with the prefix cache left full, the very same is found."""
    settings = grid(["query_attention"], [0.07], namespace=corpus)[::-1]
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: False)
    again = measure(engine, crossing[:3], settings=settings, template=TEMPLATE, max_tokens=8)
    for name, samples in again.samples.items():
        for one, other in zip(samples, result.samples[name], strict=False):
            assert (one.text, one.agreement.equal) == (other.text, other.agreement.equal), name
            assert one.agreement.kl == pytest.approx(other.agreement.kl, abs=1e-3), name


def test_questions_that_reuse_nothing_are_told_apart(engine: Engine, corpus: str) -> None:
    document = (EXAMPLES / "corpus" / "projects" / "mir-bol.txt").read_text().strip()
    questions = [
        Question("stored", prompt=f"and {document} Question : who leads Mir bol ? Answer :"),
        Question("not stored", prompt="Question : who leads Mir bol ? Answer :"),
        Question("too long", prompt=f"{document} " * 30),
        Question("of messages", prompt=[{"role": "user", "content": f"and {document} Answer :"}]),
    ]
    settings = grid([], namespace=corpus)[:1]
    seen: list[tuple[int, int]] = []
    found = measure(
        engine,
        questions,
        settings=settings,
        max_tokens=2,
        on_progress=lambda done, total, name: seen.append((done, total)),
    )
    assert [one.question for one in found.full_answers] == ["stored", "of messages"]
    assert found.full is not None and found.full.f1 is None
    assert [one.question for one in found.not_reused] == ["not stored"]
    assert "no stored chunk" in found.not_reused[0].reason
    assert [one.question for one in found.failed] == ["too long"]
    assert [line.name for line in found.lines] == [AS_STORED, "exact"]
    assert seen == sorted(seen) and seen[-1] == (12, 12)


def test_there_has_to_be_something_to_ask(engine: Engine, namespace: str) -> None:
    bare = [Question("one", text="who ?")]
    settings = grid(namespace=namespace)
    with pytest.raises(OptionError, match=r"no documents of this model in the namespace .* semkv"):
        measure(engine, bare, settings=settings)
    with pytest.raises(OptionError, match="no question"):
        measure(engine, [])
    other = [replace(settings[0], options=replace(settings[0].options, namespace="other"))]
    with pytest.raises(OptionError, match="several namespaces"):
        measure(engine, bare, settings=[*settings, *other])


def test_what_is_stopped_goes_on(
    engine: Engine, corpus: str, crossing: list[Question], result: QualityResult, tmp_path: Path
) -> None:
    settings = grid(["query_attention"], [0.07], namespace=corpus)
    asked: list[str] = []

    def stop_in_the_third(done: int, total: int, name: str) -> None:
        asked.append(name)
        if name == crossing[2].name:
            raise KeyboardInterrupt

    def run(**more: Any) -> QualityResult:
        return measure(
            engine,
            crossing,
            settings=settings,
            template=TEMPLATE,
            max_tokens=more.pop("max_tokens", 8),
            resume=tmp_path / "kept",
            **more,
        )

    stopped = run(on_progress=stop_in_the_third)
    assert stopped.interrupted and stopped.full is not None and stopped.recommendation is not None
    assert stopped.full.questions == 2
    with (tmp_path / "kept").open("a") as file:
        file.write('{"key": "torn')
    asked.clear()
    whole = run(on_progress=lambda done, total, name: asked.append(name))
    assert not {one.name for one in crossing[:2]} & set(asked)
    assert whole.lines and not whole.interrupted
    assert [line.agreement for line in whole.lines] == [line.agreement for line in result.lines]
    with pytest.raises(OptionError, match="a measurement with another"):
        run(max_tokens=9)
    (tmp_path / "kept").write_text("something else\n")
    with pytest.raises(OptionError, match="give another file"):
        run()


def test_stopped_before_anything_is_known(
    engine: Engine, corpus: str, crossing: list[Question]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    settings = grid(["query_attention"], [0.07], namespace=corpus)
    with pytest.raises(KeyboardInterrupt):
        measure(engine, crossing, settings=settings, template=TEMPLATE, on_progress=stop)


@pytest.fixture
def on_the_session_s_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The command gets this engine for its own; it neither starts nor ends one."""
    monkeypatch.setattr(semkv_rag.engine, "Engine", lambda *_, **__: nullcontext(engine))
    return engine


def test_the_command_from_ctxs_to_advice(
    semkv: Semkv, on_the_session_s_engine: Engine, namespace: str, tmp_path: Path
) -> None:
    documents = sorted((EXAMPLES / "corpus" / "projects").glob("*.txt"))
    ctxs = [{"title": "", "text": path.read_text().strip()} for path in documents[:3]]
    names = [path.stem.replace("-", " ").capitalize() for path in documents[:3]]
    questions = [
        {"ctxs": ctxs, "question": f"who leads {name} ?", "answers": ["Hans"]} for name in names
    ]
    (tmp_path / "musique.json").write_text(json.dumps(questions))
    (tmp_path / "template").write_text(TEMPLATE.text + "\n")
    root = on_the_session_s_engine.store
    assert root is not None
    asked: tuple[Any, ...] = ("quality", "--model", READER, "--store", root.root)
    asked += ("--questions", tmp_path / "musique.json", "--template", tmp_path / "template")
    asked += ("--namespace", namespace, "--selector", "chunk_head", "--ratio", "0.2")
    asked += ("--max-tokens", "4", "--limit", "2")
    missing = semkv(*asked)
    assert (missing.code, missing.out) == (1, "")
    assert "2 questions with nothing reused" in missing.err and "--precompute" in missing.err
    out, plotted = tmp_path / "out.json", tmp_path / "plot.png"
    done = semkv(*asked, "--precompute", "--out", out, "--plot", plotted)
    assert done.code == 0, done.err
    assert "2 questions of 2 compared, 2 with known answers" in done.out
    assert "chunk_head 20 %" in done.out and "Recommended: " in done.out
    assert "What this can't tell:" in done.out
    lines = json.loads(out.read_text())["lines"]
    assert [line["name"] for line in lines] == [AS_STORED, *PRESETS, "chunk_head 20 %"]
    assert plotted.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "options", "code", "words"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}\n', (), 2, "questions:2: give a prompt"),
        ('{"prompt": "a"}', ("--selector", "best"), 2, "selector is 'best'"),
        ('{"prompt": "a"}', ("--ratio", "2"), 2, "ratio is 2.0"),
        ('{"prompt": "a"}', ("--target", "0"), 2, "--target 0.0"),
        ('{"prompt": "a"}', ("--plot", "plot.txt"), 2, "ending in .png"),
        ('{"prompt": "a"}', ("--out", "none/out.json"), 2, "no such folder"),
        ('{"prompt": "a"}', ("--namespace", ""), 2, "namespace is ''"),
        ('{"prompt": "a"}', ("--question-tokens", "0"), 2, "question_tokens is 0"),
        ('{"prompt": "a"}', ("--engine-arg", "dtype"), 2, "write NAME=VALUE"),
        ('{"prompt": "a"}', (), 1, "there is no store at"),
    ],
)
def test_all_is_checked_before_vllm_is_started(
    semkv: Semkv,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    options: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.delattr(semkv_rag.engine, "Engine")
    questions = tmp_path / "questions"
    questions.write_text(content)
    store = tmp_path / "store"
    outcome = semkv("quality", "--model", "m", "--store", store, "--questions", questions, *options)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("semkv: ") and words in outcome.err
    assert not store.exists()


def test_codecs_side_by_side(engine: Engine, corpus: str, crossing: list[Question]) -> None:
    assert engine.store is not None
    settings = codec_settings(["plain", "int8"], ReuseOptions())
    sizes = copies(engine.store, engine, settings, corpus)
    assert sizes["plain"] / sizes["int8"] > 3  # the reader's are float32
    result = measure(
        engine,
        crossing[:3],
        settings=settings,
        template=TEMPLATE,
        max_tokens=8,
        namespace=settings[0].options.namespace,
    )
    assert [line.name for line in result.lines] == ["plain", "int8", "exact"]
    assert result.full is not None and result.full.questions == 3
    with pytest.raises(OptionError, match="compared on a store that was precomputed as plain"):
        copies(engine.store, engine, settings, settings[1].options.namespace)
    with pytest.raises(OptionError, match="holds no chunks"):
        copies(engine.store, engine, settings, "nobody")
