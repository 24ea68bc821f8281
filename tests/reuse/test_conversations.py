"""A prompt that goes on from an earlier one keeps its question."""

from __future__ import annotations

from semkv_rag.config import ReuseOptions
from semkv_rag.reuse import Conversations, ReusePlan, Span, make_plan, token_array
from semkv_rag.reuse.conversations import QUESTIONS
from semkv_rag.reuse.question import LEAST

CHUNK = list(range(1000, 1300))
FIRST = list(range(2000, 2020))
MORE = list(range(3000, 3100))


def ask(talks: Conversations, prompt: list[int], **options: object) -> ReusePlan:
    chosen = ReuseOptions.from_mapping({"selector": "query_attention", **options})
    made = make_plan([Span("a", 0, 0, len(CHUNK))], len(prompt), chosen)
    assert made is not None
    return talks.with_earlier_question(made.asking(prompt), token_array(prompt))


def test_the_first_question_stays() -> None:
    talks = Conversations()
    first = ask(talks, CHUNK + FIRST)
    assert first.question is not None and first.question.tokens == tuple(FIRST)
    later = ask(talks, CHUNK + FIRST + MORE)
    assert later.digest() == first.digest()
    assert ask(talks, CHUNK + FIRST + MORE + FIRST).digest() == first.digest()


def test_another_question_is_another_conversation() -> None:
    talks = Conversations()
    first = ask(talks, CHUNK + FIRST)
    other = ask(talks, CHUNK + FIRST[:-1] + MORE)
    assert other.question != first.question
    assert ask(talks, CHUNK + FIRST[:-1] + MORE + FIRST).question == other.question


def test_another_context_is_another_conversation() -> None:
    talks = Conversations()
    first = ask(talks, CHUNK + FIRST)
    moved = ask(talks, [*CHUNK[:-1], 7, *FIRST, *MORE])
    slower = ask(talks, CHUNK + FIRST + MORE, ratio=0.5)
    assert first.question not in (moved.question, slower.question)


def test_what_a_template_has_behind_its_chunks_is_no_question() -> None:
    talks = Conversations()
    ask(talks, CHUNK + FIRST[: LEAST - 1])
    asked = ask(talks, CHUNK + FIRST)
    assert asked.question is not None and asked.question.tokens == tuple(FIRST)


def test_as_many_tokens_as_were_asked_for_are_those_of_the_end() -> None:
    talks = Conversations()
    ask(talks, CHUNK + FIRST, question_tokens=9)
    later = ask(talks, CHUNK + FIRST + MORE, question_tokens=9)
    assert later.question is not None and later.question.tokens == tuple(MORE[-9:])


def test_only_the_latest_are_remembered() -> None:
    talks = Conversations()
    prompts = [[*CHUNK, *FIRST, n] for n in range(QUESTIONS + 1)]
    first, *_, last = [ask(talks, prompt) for prompt in prompts]
    assert ask(talks, prompts[-1] + MORE).question == last.question
    assert ask(talks, prompts[0] + MORE).question != first.question
