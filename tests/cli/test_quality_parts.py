"""What `semkv quality` is made of, without a model: files, answers, comparisons, advice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_rag.config import PRESETS, ReuseOptions
from semkv_rag.errors import MissingExtraError, OptionError
from semkv_rag.quality import Passage, Template, grid, plot, read_questions
from semkv_rag.quality.answers import exact_match, f1, normalise
from semkv_rag.quality.comparing import agreement, first_difference
from semkv_rag.quality.divergence import divergence, likeliest
from semkv_rag.quality.estimate import Estimate, estimate, share
from semkv_rag.quality.recommending import recommend, unknown
from semkv_rag.quality.result import Full, Line
from semkv_rag.quality.retrieval import StoredPassages
from semkv_rag.quality.settings import AS_STORED

MUSIQUE = """[
  {"ctxs": [{"title": "Sofia", "text": "A city."}, {"text": "Untitled."}],
   "question": "Where?", "answers": ["Sofia", "sofia"], "id": "2hop__1"},
  {"question": "When?", "answer": "1952"}
]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "questions"
    path.write_text(text)
    return path


def test_a_list_of_questions(tmp_path: Path) -> None:
    path = written(tmp_path, MUSIQUE)
    first, second = read_questions(path)
    assert (first.name, second.name) == (f"{path}:2", f"{path}:4")
    assert first.passages == (Passage("A city.", "Sofia"), Passage("Untitled."))
    assert (first.text, first.answers) == ("Where?", ("Sofia", "sofia"))
    assert (second.prompt, second.passages, second.answers) == (None, (), ("1952",))


def test_an_object_in_each_line(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "Hi"}]
    path = written(
        tmp_path,
        '{"prompt": "a b", "answers": []}\n\n{"messages": [{"role": "user", "content": "Hi"}]}\n'
        '{"prompt": [{"role": "user", "content": "Hi"}], "question": "passed over"}\n',
    )
    first, second, third = read_questions(path)
    assert (first.prompt, first.answers, first.name) == ("a b", (), f"{path}:1")
    assert second.prompt == third.prompt == message
    assert second.name == f"{path}:3"


def test_every_question_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = written(
        tmp_path, '[{"prompt": "a"}, {"prompt": "b"},\n{"prompt": "c"}, {"prompt": "d"}]'
    )
    names = [one.name for one in read_questions(path)]
    assert names == [f"{path}:1", f"{path}:1:19", f"{path}:2", f"{path}:2:18"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}\n', 2, "give a prompt, messages or a question"),
        ('{"prompt": "a"}\nnonsense\n', 2, "Expecting value"),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', 3, "a comma or ] is missing"),
        ('[{"prompt": "a"},\n', 2, "the list does not end"),
        ('[{"prompt": "a"}]\n{"prompt": "b"}', 1, "behind the list"),
        ('{"prompt": "a"}\n3', 2, "write an object"),
        ('{"question": " "}', 1, "not empty"),
        ('{"prompt": ""}', 1, "prompt: give a text"),
        ('{"prompt": [{"content": "a"}]}', 1, "each is an object with a role"),
        ('{"messages": []}', 1, "at least one"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 1, "images"),
        ('{"question": "a", "ctxs": "b"}', 1, "ctxs: give a list"),
        ('{"question": "a", "ctxs": [{"title": "b"}]}', 1, "ctxs: each is"),
        ('{"question": "a", "answers": [3]}', 1, "answers: give a list of texts"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(OptionError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", " \n"])
def test_a_file_without_questions(tmp_path: Path, text: str) -> None:
    with pytest.raises(OptionError, match="holds no question"):
        read_questions(written(tmp_path, text))


def test_prompts() -> None:
    passages = [Passage("A {question}.", "Title"), Passage("B.")]
    template = Template()
    assert (
        template.prompt(passages, "Why {context}?")
        == "Title\nA {question}.\n\nB.\n\nQuestion: Why {context}?\nAnswer:"
    )
    other = Template("Read this: {question} -- {context}!", chat=True)
    assert other.prompt(passages[1:], "Why?") == [
        {"role": "user", "content": "Read this: Why? -- B.!"}
    ]
    assert Template("You answer.\n\n{context} {question}").prefix == "You answer.\n\n"
    assert other.prefix == "Read this: ", "the question that comes next is each time another"
    assert template.prefix == ""
    for text in ("{context}", "{question}", "{context} {context} {question}"):
        with pytest.raises(OptionError, match="the template has to hold"):
            Template(text)


def test_stored_passages_with_their_neighbours() -> None:
    documents = [
        ["the project is in Sofia", "it has a logo", "it began in 1952"],
        ["the club is in Dijon", "it has a mascot"],
    ]
    stored = StoredPassages(documents)
    assert [one.text for one in stored.find("Which club in Dijon?", 1)] == documents[1]
    assert [one.text for one in stored.find("when, in 1952?", 1)] == documents[0][1:]
    # Chunks of both, in the documents' order, each once.
    both = [one.text for one in stored.find("a logo or a mascot", 2)]
    assert both == [*documents[0], *documents[1]]
    assert stored.find("nothing else", 3) == []


def test_answers_as_squad_counts_them() -> None:
    assert normalise("The  Cat, an animal!") == "cat animal"
    assert exact_match("the Sofia.", ["Dijon", "sofia"]) == 1
    assert exact_match("Sofia in", ["sofia"]) == 0
    assert f1("Sofia in Bulgaria", ["sofia"]) == pytest.approx(0.5)
    assert f1("red and blue", ["blue red"]) == pytest.approx(0.8)
    assert f1("", ["a"]) == 1  # both are nothing but an article
    assert f1("x", ["y", "x"]) == 1


@st.composite
def distributions(draw: st.DrawFn) -> tuple[dict[int, float], dict[int, float]]:
    """Two whole distributions over the same tokens, as log-probabilities."""
    size = draw(st.integers(2, 12))
    weights = st.lists(st.floats(-8, 8), min_size=size, max_size=size)

    def made() -> dict[int, float]:
        logits = draw(weights)
        total = math.log(sum(map(math.exp, logits)))
        return {token: logit - total for token, logit in enumerate(logits)}

    return made(), made()


def top(whole: dict[int, float], count: int, named: int) -> dict[int, float]:
    """The likeliest tokens, and one that is named besides, as vLLM tells them."""
    best = sorted(whole, key=lambda token: -whole[token])[:count]
    return {token: whole[token] for token in (*best, named)}


@pytest.mark.slow
@given(distributions(), st.integers(1, 12), st.integers(0, 1))
def test_divergence_is_a_lower_bound_of_the_kl(
    both: tuple[dict[int, float], dict[int, float]], count: int, named: int
) -> None:
    full, other = both
    kl = sum(math.exp(full[token]) * (full[token] - other[token]) for token in full)
    bound = divergence(top(full, count, named), top(other, count, named))
    assert 0 <= bound <= kl + 1e-6
    if count >= len(full):
        assert bound == pytest.approx(kl, abs=1e-6)


def test_divergence_of_what_has_nothing_in_common() -> None:
    certain, elsewhere = {1: -0.001, 2: -9.0}, {3: -0.001, 4: -9.0}
    assert divergence(certain, elsewhere) > 5
    assert divergence(certain, certain) == pytest.approx(0, abs=1e-9)


PLACES = [{1: -0.1, 2: -3.0}, {1: -0.2, 3: -2.0}, {4: -0.1, 1: -3.0}]


def test_an_answer_that_is_the_same() -> None:
    found = agreement([1, 1, 4], PLACES, [1, 1, 4], PLACES)
    assert (found.places, found.equal, found.first_difference) == (3, 3, None)
    assert found.kl == pytest.approx(0, abs=1e-9)


def test_behind_the_first_difference_the_full_prefill_s_tokens_are_followed() -> None:
    parted = {3: -0.1, 1: -3.0}
    other = [PLACES[0], parted, {7: -0.1, 8: -3.0}]  # its own third place follows another token
    scored = [None, parted, PLACES[2]]
    found = agreement([1, 1, 4], PLACES, [1, 3, 7], other, scored)
    assert (found.places, found.equal, found.first_difference) == (3, 2, 1)
    assert found.kl == pytest.approx(divergence(PLACES[1], parted))
    assert found.first_kl == pytest.approx(0, abs=1e-9)
    # What could not be had is not counted.
    short = agreement([1, 1, 4], PLACES, [1, 3, 7], other, [None, None, None])
    assert (short.places, short.equal) == (2, 1)
    ended = agreement([1, 1, 4], PLACES, [1, 1], PLACES[:2], [None, None, {0: -0.1, 4: -3.0}])
    assert (ended.places, ended.equal, ended.first_difference) == (3, 2, 2)


def test_where_answers_part() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert likeliest({5: -1.0, 3: -1.0, 9: -2.0}) == 3


def test_an_estimate_and_its_interval() -> None:
    same = estimate([3, 3], [4, 4])
    assert (same.mean, same.low, same.high) == (0.75, 0.75, 0.75)
    mixed = share([0, 1] * 50)
    assert mixed.mean == 0.5 and 0.38 < mixed.low < 0.45 and 0.55 < mixed.high < 0.62
    # Long answers weigh by their tokens.
    assert share([1, 0], [1, 9]).mean == estimate([1, 0], [1, 9]).mean == pytest.approx(0.1)


@pytest.mark.parametrize(("questions", "wilson"), [(3, 0.438), (20, 0.839), (200, 0.981)])
def test_questions_that_all_agree_leave_a_doubt(questions: int, wilson: float) -> None:
    """About as much as Wilson's interval of as many yeses."""
    sure, none = share([8] * questions, [8] * questions), share([0.0] * questions)
    assert (sure.mean, sure.high) == (1, 1) and sure.low == pytest.approx(wilson, abs=0.06)
    assert (none.mean, none.low) == (0, 0) and none.high == pytest.approx(1 - wilson, abs=0.06)


def test_the_grid() -> None:
    selector = PRESETS["balanced"].selector
    ratios = [0.31, *(PRESETS[name].ratio for name in ("fast", "balanced"))]
    made = grid(["chunk_head", selector], ratios)
    names = [one.name for one in made]
    assert names[0] == AS_STORED and names[1:4] == list(PRESETS)
    assert len({one.options for one in made}) == len(made) == len(set(names))
    # A point that is a preset is not asked twice; that of `fast` has no least tokens.
    assert {"chunk_head 31 %", f"{selector} 31 %", f"{selector} 8 %"} <= set(names)
    assert f"{selector} 17 %" not in names
    tenant = grid(namespace="tenant", question_tokens=9)
    assert {(one.options.namespace, one.options.question_tokens) for one in tenant} == {
        ("tenant", 9)
    }
    with pytest.raises(OptionError, match="selector is 'best'"):
        grid(["best"])
    with pytest.raises(OptionError, match=r"ratio is 1\.5"):
        grid(ratios=[1.5])


FULL = Full(questions=100, tokens=900, cut=0, known=100, ttft_ms=9.0, exact_match=0.8, f1=0.9)


def line(name: str, equal: float, charged: float, f1: float | None = 0.9) -> Line:
    preset = name in PRESETS
    options = ReuseOptions.preset(name) if preset else ReuseOptions(selector=name)
    return Line(
        name=name if preset else f"{name} 15 %",
        preset=preset,
        selector=options.selector,
        ratio=options.ratio,
        check_layer=1,
        questions=100,
        agreement=Estimate(equal, equal - 0.01, min(equal + 0.01, 1)),
        answers_equal=Estimate(equal, equal, equal),
        first_difference=None,
        kl=Estimate(0, 0, 0),
        first_kl=0,
        recomputed=options.ratio,
        charged_ratio=charged,
        ttft_ms=5,
        exact_match=f1,
        f1=f1,
    )


EXACT = line("exact", 1.0, 1.0)


def test_the_cheapest_that_is_close_enough_is_recommended() -> None:
    fast, balanced = line("fast", 0.9, 0.2), line("balanced", 0.995, 0.4)
    advised = recommend([EXACT, fast, balanced], FULL)
    assert advised.preset == "balanced"
    assert "99.5 % [98.5, 100.0] equal tokens" in advised.reason
    # Another selector has to be cheaper by more than a little to be preferred to a preset.
    assert recommend([EXACT, balanced, line("chunk_head", 0.99, 0.38)], FULL).preset == "balanced"
    other = recommend([EXACT, balanced, line("chunk_head", 0.99, 0.3)], FULL)
    assert (other.preset, other.selector) == (None, "chunk_head")
    assert "more questions would tell" in recommend([EXACT, line("fast", 0.982, 0.2)], FULL).reason


def test_exact_where_nothing_comes_close_or_is_cheaper() -> None:
    far = recommend([EXACT, line("fast", 0.5, 0.2), line("balanced", 0.7, 0.4)], FULL)
    assert far.preset == "exact" and "The nearest, balanced" in far.reason
    assert recommend([EXACT, line("balanced", 1.0, 1.2)], FULL).preset == "exact"
    assert recommend([EXACT, line("balanced", 0.99, 0.4, f1=0.85)], FULL).preset == "exact"
    assert recommend([EXACT], FULL).preset == "exact"
    # What is there to compare with is never recommended.
    assert recommend([EXACT, line("all", 1.0, 0.1)], FULL).preset == "exact"
    assert recommend([EXACT, line("balanced", 0.9, 0.4)], FULL, target=0.9).preset == "balanced"


def test_what_it_can_t_tell() -> None:
    def said(full: Full, *lines: Line, found_here: bool = False) -> str:
        return "\n".join(unknown(lines, full, max_tokens=64, found_here=found_here))

    assert "few" not in said(FULL, EXACT) and "random weights" not in said(FULL, EXACT)
    assert "One store" in said(FULL, EXACT) and "not time" in said(FULL, EXACT)
    few = said(replace(FULL, questions=12), EXACT, line("fast", 0.9, 0.2))
    assert "12 questions are few: agreement is known to ±1.0 points" in few
    assert "random weights" in said(replace(FULL, f1=None), EXACT)
    assert "F1 of 10" in said(replace(FULL, f1=0.1), EXACT)
    assert "7 of 100 answers were cut at 64" in said(replace(FULL, cut=7), EXACT)
    assert "not quite as itself (99.0 %" in said(FULL, line("exact", 0.99, 1.0))
    assert "not by your retriever" in said(FULL, EXACT, found_here=True)


def test_a_plot_that_can_t_be_drawn_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "plot.txt", tmp_path / "none" / "plot.png"):
        with pytest.raises(OptionError, match="ending in"):
            plot.check_plot(path)
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"semkv-rag\[plot\]"):
        plot.check_plot(tmp_path / "plot.png")
