"""The yardstick's contexts say what their answers claim, and look as the acceptance list wants them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.quality.reading import read
from workbench.quality import grammar, rules, words
from workbench.quality.train import LEVELS


def contexts(count: int, *, held: bool = False, seed: int = 5) -> list[grammar.Context]:
    draw = random.Random(seed)
    return [grammar.make_context(draw, held=held) for _ in range(count)]


def document_tokens(context: grammar.Context, document: int) -> list[int]:
    pairs = zip(context.tokens, context.documents, strict=True)
    return [token for token, owner in pairs if owner == document]


def chunk_tokens(context: grammar.Context, chunk: int) -> list[int]:
    pairs = zip(context.tokens, context.chunks, strict=True)
    return [token for token, owner in pairs if owner == chunk]


@pytest.mark.parametrize("recipe", LEVELS)
def test_every_answer_can_be_read_from_its_document(recipe: grammar.Recipe) -> None:
    draw = random.Random(3)
    for _ in range(50):
        context = grammar.make_context(draw, recipe)
        for document in set(context.documents):
            found = read(document_tokens(context, document))
            told = {f.name: f.value for f in context.facts if f.document == document}
            assert found == told


def test_cross_facts_are_those_their_chunk_does_not_tell() -> None:
    for context in contexts(100):
        for chunk in set(context.chunks):
            found = read(chunk_tokens(context, chunk))
            for fact in context.facts:
                if fact.chunk == chunk:
                    assert (found[fact.name] is None) is fact.cross, words.text(
                        chunk_tokens(context, chunk)
                    )


def test_carriers_stand_where_the_value_is_told() -> None:
    for context in contexts(50):
        places = {c.position: c for f in context.facts for c in f.carriers}
        for fact in context.facts:
            head = fact.carriers[0].position - 2
            assert context.tokens[head] == fact.name
            assert fact.carriers[1].position == head + 3
            values = (*fact.value, words.END_OF_ANSWER)[:2]
            assert tuple(c.value for c in fact.carriers) == values
            for carrier in fact.carriers:
                if fact.kind != "root":
                    assert places[carrier.source].value == carrier.value
                    assert places[carrier.source].depth == carrier.depth - 1
                    assert carrier.source < carrier.position
                if carrier.referent >= 0:
                    assert context.tokens[head + 2] == words.IT


def test_no_name_is_told_twice_and_no_value_is_shared_by_roots() -> None:
    for context in contexts(50):
        names = [f.name for f in context.facts]
        assert len(set(names)) == len(names)
        roots = [word for f in context.facts if f.kind == "root" for word in f.value]
        assert len(set(roots)) == len(roots)


def test_names_for_evaluation_are_in_no_training_context() -> None:
    trained = {token for c in contexts(200) for token in c.tokens}
    assert max(trained) < words.FIRST_HELD
    held = {f.name for c in contexts(200, held=True) for f in c.facts}
    assert min(held) >= words.FIRST_HELD
    assert len(set(words.WORDS)) == len(words.WORDS)


def test_shares_are_what_the_acceptance_list_wants() -> None:
    made = contexts(400, held=True)
    tokens = sum(len(c.tokens) for c in made)
    matter = sum(c.cross for k in made for f in k.facts for c in f.carriers)
    assert 0.15 <= matter / tokens <= 0.25
    told = [f for k in made for f in k.facts if f.kind != "root"]
    assert 0.45 <= sum(not f.cross for f in told) / len(told) <= 0.55
    kinds = Counter((str(f.kind), f.cross) for f in told)
    assert len(kinds) == 6
    assert min(kinds.values()) > 200
    depths = Counter(f.depth for f in told if f.cross)
    assert all(depths[depth] > 1000 for depth in (1, 2, 3))
    assert 120 <= tokens / len(made) <= 300


@pytest.mark.slow
def test_no_word_gives_away_that_it_matters() -> None:
    """Every word that may matter mostly does not."""
    share = rules.matters_by_class()
    assert share.max() < 0.5
    assert (share[words.ENDS] > 0.15).all()


def test_the_same_seed_gives_the_same_contexts() -> None:
    assert contexts(5) == contexts(5)
    assert contexts(5) != contexts(5, seed=6)
