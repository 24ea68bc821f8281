"""The table's blends, picks, charges and contexts, against the same thing done plainly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semkv_rag.blend import SELECTOR_TYPES, charged_ratio, pick, smoothed
from workbench.quality import grammar, pooling, table, table_text, verdict, weighting, words
from workbench.quality.batches import Asked, Batch, collate
from workbench.quality.network import Model, rotate
from workbench.quality.passes import read
from workbench.quality.precomputed import MODES, Mode, fresh, precompute
from workbench.quality.questions import Questions, several, single
from workbench.quality.reuse import Blend, blend, prefill
from workbench.quality.study import Scores, cross
from workbench.quality.ways import Case, Ours, Plain, Way

SMALL = grammar.Recipe(documents=(2, 2), chunks=(2, 3), sentences=(3, 4), first_roots=(1, 2))
QUERY_AWARE = (
    Ours("query_attention"),
    Ours("deviation_weighted_attention", 1),
    Ours("two_hop_attention"),
    Ours("deviation_x_attention", 1),
    Plain(),
    Plain(1),
)


def contexts(seed: int, count: int) -> list[grammar.Context]:
    """Small ones that have cross questions and controls."""
    draw = random.Random(seed)
    made: list[grammar.Context] = []
    while len(made) < count:
        context = grammar.make_context(draw, SMALL, held=True)
        if sum(f.cross for f in context.facts) >= 3 and not all(f.cross for f in context.facts):
            made.append(context)
    return made


def case(model: Model, mode: Mode = "alone", count: int = 2, asked: int = 2) -> Case:
    prompts = single(contexts(3, count), 4, asked, 0)
    return Case(
        model, prompts, fresh(model, prompts.contexts), precompute(model, prompts.contexts, mode)
    )


def with_question(prompts: Questions, row: int, prompt: int) -> tuple[Batch, int]:
    """One prompt as a batch of the older study, and where its question begins."""
    batch = prompts.contexts
    length, columns = int(batch.lengths[row]), prompts.tokens.shape[2]
    own = torch.zeros(1, columns, dtype=torch.int64)
    both = torch.cat((batch.tokens[row, :length], prompts.tokens[row, prompt]))
    return (
        Batch(
            both[None],
            torch.arange(length + columns)[None],
            batch.chunks[row : row + 1, :length],
            batch.documents[row : row + 1, :length],
            batch.lengths[row : row + 1],
            own,
            own,
            [],
            [],
        ),
        length,
    )


@pytest.mark.parametrize(
    ("weight", "selector"),
    [
        ("norm + 4 means", "deviation_weighted_attention"),
        ("squared deviation", "deviation_x_attention"),
    ],
)
def test_a_weight_of_the_study_is_that_of_its_selector(
    model: Model, weight: str, selector: str
) -> None:
    mine = case(model)
    lengths, tokens = mine.questions.contexts.lengths, mine.questions.tokens.flatten(0, 1)[:, None]
    found, expected = (
        read(model, way.cache(mine, [0.3] * mine.contexts), lengths.repeat_interleave(2), tokens)
        for way in (weighting.Weighted(weight, 1), Ours(selector, 1))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("selector", "check", "keep"),
    [
        ("random", -1, True),
        ("kv_deviation", 1, True),
        ("kv_deviation", 2, True),
        ("kv_deviation_published", 1, False),
    ],
)
def test_a_blend_is_that_of_the_older_study(
    model: Model, selector: str, check: int, keep: bool
) -> None:
    """Which runs every row through every layer; here only those run that are computed."""
    mine = case(model)
    way = Ours(selector, max(check, 0))
    cache = way.cache(mine, [0.3] * mine.contexts)
    last = read(model, cache, mine.questions.contexts.lengths, mine.questions.tokens)
    for row in range(mine.contexts):
        at = mine.stored.candidates(row)
        deviation = mine.deviation(selector, check)[row] if check >= 0 else None
        chosen = at[pick(_scores(way, mine, row, deviation), round(0.3 * len(at)))]
        batch, length = with_question(mine.questions, row, 1)
        stored = [tuple(each[row : row + 1, :, :length] for each in kv) for kv in mine.stored.kv]
        picked = torch.zeros(1, length)
        picked[0, chosen] = 1
        how = Blend(len(chosen) / length, lambda _b, _d, p=picked: p, check, keep)  # type: ignore[misc]
        expected, _ = blend(model, batch, stored, how)  # type: ignore[arg-type]
        torch.testing.assert_close(last[row, 1], expected[0, length:], rtol=1e-4, atol=1e-4)


def _scores(way: Ours, mine: Case, row: int, deviation: Tensor | None) -> Tensor:
    if deviation is not None:
        return deviation
    from semkv_rag.blend.selectors import Candidates, Random
    from workbench.quality.ways import SEED

    return Random().scores(Candidates(mine.stored.ranks(row), SEED + row))


@pytest.mark.parametrize("way", [*QUERY_AWARE, Ours("kv_deviation", 1)], ids=lambda w: w.name)
def test_everything_recomputed_is_full_prefill(model: Model, way: Way) -> None:
    mine = case(model, "left")
    lengths, tokens = mine.questions.contexts.lengths, mine.questions.tokens
    full = read(model, mine.cached(mine.fresh.kv), lengths, tokens)
    cache = way.cache(mine, [1.0] * mine.contexts)
    times = len(cache[0][0]) // mine.contexts
    if times > 1:
        lengths, tokens = lengths.repeat_interleave(times), tokens.flatten(0, 1)[:, None]
    blended = read(model, cache, lengths, tokens).view(full.shape)
    torch.testing.assert_close(blended, full, rtol=1e-4, atol=1e-4)


def test_the_questions_attention_is_that_of_its_own_pass(model: Model) -> None:
    """Plainly: each question behind its context's stored KV, one softmax for each of its tokens."""
    mine = case(model)
    asked = mine.questions.length
    for row in range(mine.contexts):
        at = mine.stored.candidates(row)
        batch, length = with_question(mine.questions, row, 1)
        _, key = _seen_over(model, mine, batch, row, length)
        for layer, expected in enumerate(key):
            given = mine.attention[row * mine.prompts + 1][layer]
            torch.testing.assert_close(given, expected[at], rtol=1e-4, atol=1e-6)
        assert mine.attention[row * mine.prompts + 1].shape == (4, len(at))
        assert asked == 3


def _seen_over(
    model: Model, mine: Case, batch: Batch, row: int, length: int
) -> tuple[Tensor, list[Tensor]]:
    """The question's last state over stored KV, and what it gives each of the context's tokens."""
    asked = mine.questions.length
    at = mine.stored.candidates(row)
    x = model.embed_tokens(batch.tokens[:, length : length + asked])
    turn = model.turn(batch.positions[:, length : length + asked], torch.float32)
    given = []
    for index, block in enumerate(model.blocks()):
        query, key, value = block.self_attn.project(block.input_layernorm(x), turn)
        old_key, old_value = (each[row : row + 1, :, :length] for each in mine.stored.kv[index])
        logits = query @ torch.cat((old_key, key), 2).mT * query.shape[-1] ** -0.5
        logits[..., length:] += torch.full((asked, asked), -torch.inf).triu(1)
        among = torch.full((length + asked,), -torch.inf)
        among[at], among[length:] = 0, 0
        shares = (logits + among).softmax(-1)
        given.append(shares.square().mean((0, 1, 2)).sqrt()[:length])
        mixed = logits.softmax(-1) @ torch.cat((old_value, value), 2)
        x = x + block.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return x, given


def test_pooling_is_measured_on_the_weights_that_selectors_see(model: Model) -> None:
    mine = case(model)
    raw = pooling.weights(model, mine.questions, mine.stored)
    for given, attention in zip(raw, mine.attention, strict=True):
        squares = given.square().mean((1, 2))
        torch.testing.assert_close(squares.sqrt(), attention, rtol=1e-4, atol=1e-6)
    found = pooling.measure(model, 1)
    assert all(shares == sorted(shares) for shares in found.values())
    assert len(found) == 2 * len(pooling.POOLS)


def test_attention_picks_what_it_finds(model: Model) -> None:
    mine = case(model, asked=3)
    cache = Ours("query_attention").cache(mine, [0.1] * mine.contexts)
    for index, attention in enumerate(mine.attention):
        row = index // mine.prompts
        at = mine.stored.candidates(row)
        changed = _changed(cache, mine, row, index)
        found = smoothed(attention[1:].mean(0), mine.stored.ranks(row))
        assert changed <= set(at[found.topk(round(0.1 * len(at))).indices].tolist())
        assert changed


def _changed(cache: list[tuple[Tensor, Tensor]], mine: Case, row: int, index: int) -> set[int]:
    """The columns whose KV is another than the stored."""
    differ = torch.zeros(mine.questions.contexts.split, dtype=torch.bool)
    for (key, _), (stored, _) in zip(cache, mine.stored.kv, strict=True):
        differ |= (key[index, :, : len(differ)] != stored[row]).any(0).any(-1)
    return set(differ.nonzero().flatten().tolist())


def test_a_second_look_follows_what_the_first_found(model: Model) -> None:
    """Half of the picks are the first look's own; the others are not simply its next ones."""
    mine = case(model, asked=3)
    one = Ours("query_attention").cache(mine, [0.2] * mine.contexts)
    two = Ours("two_hop_attention").cache(mine, [0.2] * mine.contexts)
    half = Ours("query_attention").cache(mine, [0.1] * mine.contexts)
    others = 0
    for index in range(mine.contexts * mine.prompts):
        row = index // mine.prompts
        first = _changed(half, mine, row, index)
        both = _changed(two, mine, row, index)
        assert first <= both
        assert len(both) <= round(0.2 * len(mine.stored.candidates(row)))
        others += both != _changed(one, mine, row, index)
    assert others > 0


@pytest.mark.parametrize(
    "way", [*QUERY_AWARE, Ours("kv_deviation", 2), Ours("random")], ids=lambda w: w.name
)
def test_a_ratio_costs_what_it_is_charged(model: Model, way: Way) -> None:
    """Rows counted as they go through a model's projections; a check layer's rows come from the study's
    one full prefill, and are counted as that many layers of all candidates."""
    mine = case(model, count=1, asked=1)
    shape = mine.shape(0, 4)
    full = 0
    if isinstance(way, Ours) and SELECTOR_TYPES[way.selector].needs_check_layer:
        full = way.check + 1
    if isinstance(way, Plain) and way.check:
        full = way.check + 1
    with counting(model) as rows:
        way.cache(mine, [0.25])
    # The check layer itself is charged in full, and was run for the picked ones.
    picked = round(0.25 * shape.reused)
    counted = sum(rows) + full * shape.reused - (picked if full else 0)
    assert counted / (shape.layers * shape.tokens) == pytest.approx(way.charged(0.25, shape))


@contextmanager
def counting(model: Model) -> Iterator[list[int]]:
    rows: list[int] = []
    hooks = [
        block.self_attn.q_proj.register_forward_hook(
            lambda _m, args, _o: rows.append(args[0].shape[0] * args[0].shape[1])
        )
        for block in model.blocks()
    ]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("way", table.EVERY, ids=lambda w: w.name)
@pytest.mark.parametrize("layers", [6, 32])
def test_the_ratio_for_a_charge_is_the_largest(model: Model, way: Way, layers: int) -> None:
    shape = replace(case(model, count=1).shape(0, layers), reused=140, exact=27)
    for charged in (0.05, 0.1, 0.2, 0.5):
        ratio = way.ratio(charged, shape)
        if ratio is None:
            assert way.charged(0.0, shape) > charged
            continue
        assert way.charged(ratio, shape) <= charged
        more = (round(ratio * shape.reused) + 1) / shape.reused
        assert more >= 1 or way.charged(more, shape) > charged
    if isinstance(way, Ours):
        check = replace(shape, check_layer=way.check)
        assert way.charged(0.1, shape) == charged_ratio(way.selector, 0.1, check)


@pytest.mark.parametrize("mode", MODES)
def test_stored_kv_is_that_of_a_prefill_of_its_own(model: Model, mode: Mode) -> None:
    batch = collate([(context, ()) for context in contexts(5, 2)])
    stored, known = precompute(model, batch, mode), fresh(model, batch)
    for row, length in enumerate(batch.lengths.tolist()):
        chunks = batch.chunks[row, :length]
        for chunk in range(int(chunks.max()) + 1):
            at = (chunks == chunk).nonzero().flatten()
            before = _context(batch, mode, row, chunk)
            both = torch.cat((batch.tokens[row, before], batch.tokens[row, at]))
            alone = _plain_kv(model, both[None])
            start = int(at[0]) - len(before)
            turn = model.turn(torch.full((1, len(both)), start), torch.float32)
            for (key, value), (own_key, own_value) in zip(stored.kv, alone, strict=True):
                turned = rotate(own_key, turn)[0, :, len(before) :]
                torch.testing.assert_close(key[row][:, at], turned, rtol=1e-4, atol=1e-4)
                own = own_value[0, :, len(before) :]
                torch.testing.assert_close(value[row][:, at], own, rtol=1e-4, atol=1e-4)
            exact = bool(stored.exact[row, at].all())
            assert exact == bool(stored.exact[row, at].any())
            same = torch.allclose(
                stored.kv[-1][1][row][:, at], known.kv[-1][1][row][:, at], atol=1e-4
            )
            assert exact == same


def _context(batch: Batch, mode: Mode, row: int, chunk: int) -> Tensor:
    """The columns that a chunk was computed behind, said once more."""
    chunks, documents = batch.chunks[row], batch.documents[row]
    mine = chunks == chunk
    nothing = torch.zeros(0, dtype=torch.int64)
    if mode == "alone" or chunk == 0:
        return nothing
    document = documents[mine][0]
    if mode == "document":
        return ((documents == document) & (chunks < chunk)).nonzero().flatten()
    if mode == "left":
        return ((documents == document) & (chunks == chunk - 1)).nonzero().flatten()
    told = [
        {t for t in batch.tokens[row, chunks == c].tolist() if t >= words.VALUES[0]}
        for c in range(int(chunks.max()) + 1)
    ]
    most = max(len(told[c] & told[chunk]) for c in range(len(told)) if c != chunk)
    best = [c for c in range(len(told)) if c != chunk and len(told[c] & told[chunk]) == most]
    nearest = min(abs(c - chunk) for c in best)
    return (chunks == min(c for c in best if abs(c - chunk) == nearest)).nonzero().flatten()


def _plain_kv(model: Model, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    count = tokens.shape[1]
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((key, value))
        return key, value

    causal = torch.full((1, 1, count, count), -1e4).triu(1)
    with torch.no_grad():
        model.states(
            tokens,
            torch.arange(count)[None],
            (causal, causal.new_zeros(1, 1, 0, count)),
            [keep] * len(model.layers),
        )
    return kept


def test_several_questions_stand_behind_each_other_and_each_is_last_once() -> None:
    (context,) = contexts(6, 1)
    asked = several([context], 1)
    names = asked.tokens[0, :, 1 : asked.length : 3].tolist()
    assert asked.length == 9
    assert [turn[-1] for turn in names] == [fact.name for fact in asked.facts[0]]
    assert all(sorted(turn) == sorted(names[0]) for turn in names)
    assert all(fact.cross for fact in asked.facts[0])


def test_an_answer_is_read_off_behind_its_question(model: Model) -> None:
    (context,) = contexts(6, 1)
    asked = several([context], 1)
    known = fresh(model, asked.contexts)
    batch, length = with_question(asked, 0, 2)
    last, _ = prefill(model, batch, torch.zeros(1, length, dtype=torch.int64))
    mine = Case(model, asked, known, precompute(model, asked.contexts, "alone"))
    state = read(model, mine.cached(known.kv), asked.contexts.lengths, asked.tokens)
    torch.testing.assert_close(state[0, 2], last[0, length:], rtol=1e-4, atol=1e-4)
    found = asked.right(model, _spelling(model, asked))
    assert found == [True] * 3


def _spelling(model: Model, asked: Questions) -> Tensor:
    """States that spell every answer."""
    table_ = model.embed_tokens.weight.detach()
    unlike = table_ - table_.mean(0)
    last = torch.zeros(*asked.tokens.shape, model.shape.hidden)
    for column, fact in enumerate(asked.facts[0]):
        for step, word in enumerate(fact.answer):
            last[0, column, asked.length - 1 + step] = 50 * unlike[word]
    return last


@pytest.mark.slow
def test_the_table_has_every_point_and_says_what_can_not_be_had(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (
        "kv_deviation_published@1",
        "k_deviation_published@1",
        "kv_deviation@2",
        "two_hop_attention",
    )
    monkeypatch.setattr(table, "EVERY", tuple(way for way in table.EVERY if way.name in few))
    monkeypatch.setattr(table, "RATIOS", (0, 5, 10, 15, 20, 100))
    monkeypatch.setattr(table, "MODES", ("alone", "left"))
    monkeypatch.setattr(verdict, "SHOWN", few[-1:])
    found = table.measure(model, 1, 1, 3)
    told = table.figures(found)
    ways = told["ways"]
    assert isinstance(ways, dict)
    for scores in found.scores.values():
        assert all(len(ok) == len(scores.asked) for ok in scores.ways.values())
    assert ways["alone kv_deviation@2 32 5"] == {"cannot": True}
    point = ways["alone two_hop_attention 32 20"]
    assert point["charged"] <= 20 and point["uncharged"] < point["charged"]
    for name in ("cross", "control", "chain", "depth 2", "several", "cross interval"):
        assert name in point
    lines = verdict.lines(*({"random": found.scores[kind]} for kind in ("one", "several")))
    assert any("can't; plain reuse" in line for line in lines)
    text = table_text.tables(
        *({"random": found.scores[kind]} for kind in ("one", "several")),
        table.mean_uncharged([found]),
        few,
        table.filters(),
    )
    row = next(line for line in text.splitlines() if line.startswith("| `kv_deviation@2`"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "-"
    point = ways["alone kv_deviation@2 32 20"]
    assert cells[5] == f"{point['cross']:.0f} ({point['uncharged']:.0f})"


def test_the_comparison_is_paired_by_context() -> None:
    draw = random.Random(1)
    scores = Scores()
    for index in range(40):
        facts = [f for f in grammar.make_context(draw, held=True).facts if f.cross][:4]
        scores.asked += [Asked(0, fact, 0) for fact in facts]
        scores.contexts += [index] * len(facts)
    count = len(scores.asked)
    assert all(cross(asked) for asked in scores.asked)
    scores.ways = {
        "full": [True] * count,
        "alone nothing": [i % 10 == 0 for i in range(count)],
        "half": [i % 10 == 0 or i % 2 == 1 for i in range(count)],
    }
    middle, low, high = verdict.share_of_full(scores, "half", "alone nothing")
    assert low < middle < high
    assert middle == pytest.approx(500 / 9, abs=1)
    assert verdict.share_of_full(scores, "full", None) == (100, 100, 100)
