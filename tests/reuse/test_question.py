"""Which tokens are the question, and where it is put."""

from __future__ import annotations

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.reuse import Question, ReusePlan, Span, make_plan
from semkv_rag.reuse.question import LEAST, MOST, find_question

PROMPT = list(range(1000, 1400))


def plan(prompt: list[int], **options: object) -> ReusePlan:
    made = make_plan([Span("a", 0, 10, 300)], len(prompt), ReuseOptions.from_mapping(options))
    assert made is not None
    return made.asking(prompt)


def test_it_is_what_stands_behind_the_chunks() -> None:
    assert find_question(PROMPT, 370) == Question(tuple(range(1370, 1400)), 370)


def test_of_a_long_text_only_the_end_right_behind_the_chunks() -> None:
    assert find_question(PROMPT, 200) == Question(tuple(range(1400 - MOST, 1400)), 200)


def test_of_a_short_one_some_of_the_chunk_too() -> None:
    assert find_question(PROMPT, 399) == Question(tuple(range(1400 - LEAST, 1400)), 400 - LEAST)


@pytest.mark.parametrize(("wanted", "position"), [(5, 370), (30, 370), (40, 360), (200, 200)])
def test_as_many_tokens_as_were_asked_for(wanted: int, position: int) -> None:
    question = find_question(PROMPT, 370, wanted)
    assert question == Question(tuple(PROMPT[-wanted:]), position)


def test_a_prompt_may_be_shorter_than_the_question() -> None:
    assert find_question([1, 2, 3], 2, 50) == Question((1, 2, 3), 0)


def test_no_image_is_asked_with() -> None:
    image = [*PROMPT[:380], -5, -6, *PROMPT[382:]]
    assert find_question(image, 370) == Question(tuple(PROMPT[382:]), 370)
    assert find_question([*PROMPT, -7], 370).tokens == ()


def test_only_where_the_selector_looks_at_it() -> None:
    assert plan(PROMPT, selector="kv_deviation").question is None
    for ratio in (0.0, 1.0):
        assert plan(PROMPT, selector="query_attention", ratio=ratio).question is None
    for selector in ("sensitivity_attention", "query_attention"):
        asking = plan(PROMPT, selector=selector)
        assert asking.question == Question(tuple(PROMPT[-MOST:]), 310)


def test_another_question_is_another_plan() -> None:
    other = [*PROMPT[:-1], 7]
    digests = {
        plan(prompt, selector="query_attention", question_tokens=count).digest()
        for prompt in (PROMPT, other)
        for count in (None, 5, 80)
    }
    assert len(digests) == 6
    same = (plan(prompt, selector="kv_deviation").digest() for prompt in (PROMPT, other))
    assert len(set(same)) == 1


@pytest.mark.parametrize("count", [0, -1, 257, 1.5, True, "8"])
def test_impossible_numbers_of_tokens(count: object) -> None:
    with pytest.raises(OptionError, match="question_tokens"):
        ReuseOptions.from_mapping({"question_tokens": count})
