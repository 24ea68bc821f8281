"""What may and what may not answer for what, by table, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_rag.prompt_cache.guard import Veto, veto, vetoes
from semkv_rag.prompt_cache.guard.lexicon import Lexicon, lexicon

SAME = [
    ("What is the capital of France?", "Could you tell me France's capital city?"),
    ("Do you know if cats can eat cheese?", "Can cats eat cheese?"),
    ("Tell me the population of Chile.", "What is the population of Chile?"),
    ("How long does five kilometres take?", "How long does 5,000 m take?"),
    ("Is 1.5 km far?", "Is 1,500 metres far?"),
    ("Can I buy 12 eggs?", "Is it possible to purchase a dozen eggs?"),
    ("Is two hundred and five too many?", "Is 205 too many?"),
    ("Is 5% enough?", "Is five per cent enough?"),
    ("Is half an hour enough?", "Is 30 minutes enough?"),
    ("Is 60 km/h fast?", "Is 60 kilometres per hour fast?"),
    ("Is $5 cheap?", "Is 5 dollars cheap?"),
    ("Who was 2nd?", "Who was second?"),
    ("Who won the 21st race?", "Who won the twenty-first race?"),
    ("What happened on 2023-01-05?", "What happened on January 5, 2023?"),
    ("What happened on 5 January 2023?", "What happened on Jan 5th, 2023?"),
    ("Is the shop open at 5 pm?", "Is the store open at 17:00?"),
    ("Who wrote Hamlet?", "Who was Hamlet written by?"),
    ("Who wrote Hamlet?", "By whom was Hamlet written?"),
    ("Did Smith beat Jones?", "Was Jones beaten by Smith?"),
    ("What is the best museum in Paris?", "In Paris, what is the best museum?"),
    ("Which planet is the largest?", "What is the largest planet?"),
    ("How tall is Mount Everest?", "What is the height of Mount Everest?"),
    ("How much does a ticket to Rome cost?", "What is the price of a ticket to Rome?"),
    ("How do I reset my password?", "What is the best way to reset your password?"),
    ("Why isn't my router working?", "Why is my router not working?"),
    ("Is GPT-4 good?", "is gpt-4 good"),
]

OTHER = {
    "number": [
        ("Is 5 km far?", "Is 5 miles far?"),
        ("Is 0.5 mg safe?", "Is 0.05 mg safe?"),
        ("What changed in Python 3.1?", "What changed in Python 3.10?"),
        ("Is it -5 °C?", "Is it 5 °C?"),
        ("Is 20 °C warm?", "Is 20 °F warm?"),
        ("Is 5 MB much?", "Is 5 MiB much?"),
        ("Is 5 kg heavy?", "Is five pounds heavy?"),
        ("What is 1/2 of it?", "What is 1/3 of it?"),
        ("Is 5% enough?", "Is 5 enough?"),
    ],
    "ordinal": [("Who was 2nd?", "Who was 3rd?"), ("Who was the first king?", "Who was the king?")],
    "date": [
        ("What happened on 2023-01-05?", "What happened on May 1, 2023?"),
        ("What happened on 1/5/2023?", "What happened on 2023-01-05?"),
        ("What happened in the 1990s?", "What happened in the 1980s?"),
    ],
    "time of day": [("Is it open at 5 am?", "Is it open at 5 pm?")],
    "negation": [
        ("Is it safe?", "Is it not safe?"),
        ("Why does it work?", "Why doesn't it work?"),
        ("Why does it start?", "Why does it fail to start?"),
        ("Is tea with milk good?", "Is tea without milk good?"),
        ("Is it safe?", "Is it never safe?"),
    ],
    "quantifier": [
        ("Do most cats purr?", "Do some cats purr?"),
        ("Did Ann win?", "Did only Ann win?"),
        ("Are 5 enough?", "Are at least 5 enough?"),
        ("Is it tea and milk?", "Is it tea or milk?"),
    ],
    "opposites": [
        ("Is it legal?", "Is it illegal?"),
        ("Do all cats purr?", "Do some cats purr?"),
        ("Is it safe?", "Is it unsafe?"),
        ("Which is the highest?", "Which is the lowest?"),
        ("How do I encrypt it?", "How do I decrypt it?"),
        ("Should I eat before running?", "Should I eat after running?"),
    ],
    "temporal word": [
        ("Is it cold today?", "Is it cold tonight?"),
        ("Is it new?", "Is it still new?"),
    ],
    "question word": [("When did it begin?", "Where did it begin?"), ("Who is it?", "What is it?")],
    "modal verb": [("Can I go?", "Should I go?")],
    "tense": [("Who is the king?", "Who was the king?"), ("Will it rain?", "Did it rain?")],
    "person": [
        ("How do I feel?", "How do they feel?"),
        ("Can I sell my car?", "Can I sell your car?"),
        ("What is my name?", "What is your name?"),
        ("Did he see her?", "Did she see her?"),
    ],
    "name": [
        ("Is Ann here?", "Is Bob here?"),
        ("Who is Mr Adam?", "Who is Mr Adams?"),
    ],
    "identifier": [
        ("What does get_user do?", "What does set_user do?"),
        ("Is v1.2.3 out?", "Is v1.2.4 out?"),
        ("What does tar -x do?", "What does tar -X do?"),
    ],
    "word": [
        ("Is tea good for sleep?", "Is coffee good for sleep?"),
        ("What is the capital?", "What is the former capital of it?"),
        ("Is the US big?", "Is it big?"),
        ("What do dogs have?", "What do dogs do?"),
    ],
    "sign": [("Is x < y?", "Is x > y?"), ("Is x == y?", "Is x != y?")],
    "another": [
        ("Can I speak French?", "Can you speak French?"),
        ("How do I store data?", "How do you store data?"),
    ],
    "direction word": [("Do I fly to Rome?", "Do I fly from Rome?")],
    "preposition": [("Is it in the box?", "Is it on the box?")],
    "another order": [
        ("Did Ann beat Bob?", "Did Bob beat Ann?"),
        ("Was Bob hit by Tom?", "Was Tom hit by Bob?"),
        ("Does the dog bite the man?", "Does the man bite the dog?"),
        ("Is A better than B?", "Is B better than A?"),
        ("Who beat John?", "Who did John beat?"),
        ("Which company bought Google?", "Which company was bought by Google?"),
        ("Are all cats animals?", "Are all animals cats?"),
        ("flight from Paris to London", "flight from London to Paris"),
        ("Is the red cube on the blue one?", "Is the blue cube on the red one?"),
        ("Who is the wife of Ann's boss?", "Who is the boss of Ann's wife?"),
        ("Did Tom, not Ann, win?", "Did Ann, not Tom, win?"),
        ("Is tea with milk without sugar good?", "Is tea with sugar without milk good?"),
        ("Do I add salt before oil?", "Do I add oil before salt?"),
        ("foo(a, b)", "foo(b, a)"),
        ("Is 5 minus 3 odd?", "Is 3 minus 5 odd?"),
        ("Did I call you?", "Did you call me?"),
    ],
}


@pytest.mark.parametrize(("donor", "prompt"), SAME)
def test_same_meaning_passes(donor: str, prompt: str) -> None:
    assert veto(donor, prompt) is None
    assert veto(prompt, donor) is None


@pytest.mark.parametrize(
    ("reason", "donor", "prompt"),
    [(reason, *pair) for reason, listed in OTHER.items() for pair in listed],
)
def test_other_meaning_is_vetoed(reason: str, donor: str, prompt: str) -> None:
    found, back = veto(donor, prompt), veto(prompt, donor)
    assert found is not None
    assert back is not None
    assert reason in found.reason
    assert (found.donor, found.prompt) == (back.prompt, back.donor)
    assert found.donor or found.prompt


def test_both_pieces_are_named() -> None:
    assert veto("Is 5 km far?", "Is 5 miles far?") == Veto("another number", "5 km", "5 miles")


@pytest.mark.parametrize(
    "text", ["今天天气怎么样", "¿Está abierto hoy?", "Ist Berlin größer als Paris?"]
)
def test_other_languages_serve_only_for_themselves(text: str) -> None:
    assert veto(text, text) is None
    assert veto(
        text, text.replace("今", "明").replace("abierto", "cerrado").replace("Berlin", "Rom")
    )


@pytest.mark.parametrize("donor", ["", "  ", "?", "Is it safe?"])
def test_empty_prompt_is_vetoed(donor: str) -> None:
    assert veto(donor, "") is not None


def test_long_prompt_is_vetoed() -> None:
    long = "word " * 5000
    assert veto(long, long) is not None


def test_exception_is_a_veto(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Veto | None:
        raise RuntimeError("no lexicon")

    assert veto("Is it safe?", "Is it safe?") is None
    monkeypatch.setattr(vetoes, "_CHECKS", (broken,))
    found = veto("Is it safe?", "Is it safe?")
    assert found is not None
    assert "no lexicon" in found.reason


def test_wrong_type_is_a_veto() -> None:
    assert veto(None, "Is it safe?") is not None  # type: ignore[arg-type]


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_gets_an_answer(donor: str, prompt: str) -> None:
    found, back = veto(donor, prompt), veto(prompt, donor)
    assert (found is None) == (back is None)
    for text in (donor, prompt):
        itself = veto(text, text)
        assert itself is None or "failed" not in itself.reason


def test_lexicon_refuses_contradictions() -> None:
    words = lexicon()
    assert words.canonical("purchased") == words.canonical("buys")
    assert words.canonical("smallest") in words.opposites(words.canonical("biggest"))
    lists = {
        "framing": [], "framing_before_question": [], "framing_before_noun": [], "framing_joints": [],
        "courtesies": [], "ignored": [], "markers": {"strong": []}, "prepositions": {},
        "temporal": {"words": []}, "questions": {}, "negations": {}, "quantifiers": {}, "modals": {},
        "persons": {}, "phrases": {"a b": "c"}, "measures": {"words": []},
        "irregular": {"past": {}, "forms": {}, "whole": []},
        "synonyms": {"lines": ["big, large"]}, "antonyms": {"lines": ["big | small"]},
    }  # fmt: skip
    Lexicon(lists)
    with pytest.raises(ValueError, match="synonyms and antonyms"):
        Lexicon({**lists, "antonyms": {"lines": ["big | large"]}})
    with pytest.raises(ValueError, match="two lines"):
        Lexicon({**lists, "synonyms": {"lines": ["big, large", "large, wide"]}})
