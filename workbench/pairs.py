"""Two tenants who ask alike: what one has had computed or stored must never reach the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.engine.completion import join
from semkv_rag.report import ReuseReport
from workbench.chunks import random_tokens, store_chunks
from workbench.settings import ENGINE_ARGS

BLOCK: int = ENGINE_ARGS["block_size"]
TOGETHER = 16
"""Pairs that are asked side by side."""


@dataclass
class Spill:
    """What one tenant got of the other's. `own` is what tenants got of what was theirs.

    Attributes:
        found: pairs, in words, of which something went across.
        own: tokens that a tenant found again of its own, cached or stored: with none of them the check
            would see nothing.
    """

    found: list[str] = field(default_factory=list)
    own: int = 0
    pairs: int = 0


@dataclass(frozen=True)
class Pair:
    """One tenant asks `first`, the other one then something like it.

    Attributes:
        kind: `same` prompt; a `follow`-up on the answer; a `stored` chunk in the prompt; `beam` search.
        behind: tokens that the second prompt has behind the first one and its answer.
    """

    number: int
    kind: str
    first: list[int]
    answer_tokens: int
    behind: list[int]


def pairs(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs; all lengths around the block size come up."""
    rng = random.Random(seed)
    for number in range(count):
        kind = rng.choices(("same", "follow", "stored", "beam"), (3, 5, 2, 1))[0]
        blocks = rng.randrange(0, 4)
        length = max(1, blocks * BLOCK + rng.randrange(-3, 4))
        if kind == "stored":
            length += 40
        tokens = random_tokens(rng.randrange(1 << 60), length)
        behind = random_tokens(rng.randrange(1 << 60), rng.randrange(1, BLOCK + 3))
        yield Pair(number, kind, tokens, rng.randrange(1, BLOCK + 5), behind)


def spill(engine: Engine, tenants: tuple[str, str], every: Sequence[Pair]) -> Spill:
    """Ask all pairs, the tenants in turns, and look for what went across.

    There are not thousands of prompts of a token or two, and the model answers many alike. A tenant finds
    again what is its own: blocks that another of its requests began with, and chunks, stored in its
    namespace, whose tokens stand in a request of its own in another pair. They are not counted as across.
    """
    seen = Spill()
    computed: Counter[tuple[str, int]] = Counter()
    sent: dict[str, list[tuple[int, str]]] = {tenant: [] for tenant in tenants}
    for begin in range(0, len(every), TOGETHER):
        some = every[begin : begin + TOGETHER]
        # Turns, so that neither is always the first.
        turns = [tenants if pair.number % 2 else tenants[::-1] for pair in some]
        asked = [(pair, pair.first, one) for pair, (one, _) in zip(some, turns, strict=True)]
        for pair, prompt, one in asked:
            if pair.kind == "stored":
                store_chunks(engine, [prompt], namespace=one)
            if pair.kind == "beam":
                _search(engine, pair, one)
        plain = [given for given in asked if given[0].kind != "beam"]
        answers = _ask(engine, plain)
        for (_, prompt, one), answer in zip(plain, answers, strict=True):
            computed.update(_beginnings(one, [*prompt, *answer.token_ids]))
        for (pair, prompt, one), answer in zip(plain, answers, strict=True):
            sent[one].append((pair.number, _in_words(prompt, answer.token_ids)))
        said = iter(answers)
        later = [
            pair.first + ([] if pair.kind == "beam" else [*next(said).token_ids]) + pair.behind
            for pair in some
        ]
        second = list(zip(some, later, turns, strict=True))
        across = _ask(engine, [(pair, prompt, other) for pair, prompt, (_, other) in second])
        again = _ask(engine, [(pair, prompt, one) for pair, prompt, (one, _) in second])
        for (_, prompt, (one, other)), answer, own in zip(second, across, again, strict=True):
            computed.update(_beginnings(other, [*prompt, *answer.token_ids]))
            computed.update(_beginnings(one, [*prompt, *own.token_ids]))
        for (pair, prompt, (_, who)), other in zip(second, across, strict=True):
            sent[who].append((pair.number, _in_words(prompt, other.token_ids)))
        for (pair, prompt, (_, who)), other, own in zip(second, across, again, strict=True):
            cached = other.report.cached_tokens
            beginning = (who, hash(tuple(prompt[:cached])))
            elsewhere = [words for number, words in sent[who] if number != pair.number]
            its_own = not cached or computed[beginning] > 1
            its_own = its_own and _are_its_own(engine, who, other.report, elsewhere)
            if (got := _got(other.report)) and not its_own:
                seen.found.append(f"{pair.kind} {len(pair.first)}+{pair.answer_tokens}: {got}")
            seen.own += _tokens(own.report)
        seen.pairs += len(some)
        for (pair, prompt, (one, _)), own in zip(second, again, strict=True):
            sent[one].append((pair.number, _in_words(prompt, own.token_ids)))
    return seen


def _are_its_own(engine: Engine, who: str, report: ReuseReport, elsewhere: Sequence[str]) -> bool:
    """Whether all chunks of a request are the tenant's, out of other requests that it sent."""
    if report.served_by or report.donor:
        return False
    assert engine.store is not None
    chunks = engine.store.tokens(engine.fingerprint, who, report.chunk_ids, patient=True)
    return all(
        id_ in chunks and any(_in_words(chunks[id_].tokens) in words for words in elsewhere)
        for id_ in report.chunk_ids
    )


def _in_words(*parts: Iterable[int]) -> str:
    """Tokens as a text in which only whole tokens are found."""
    return "".join(f" {int(token)};" for part in parts for token in part)


def _beginnings(who: str, tokens: Sequence[int]) -> Iterator[tuple[str, int]]:
    """The blocks that a tenant's request began with, each with all before it."""
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        yield who, hash(tuple(tokens[:end]))


def _ask(engine: Engine, asked: Sequence[tuple[Pair, list[int], str]]) -> list[Completion]:
    """The answers, in order, asked side by side."""
    streams = [
        engine.stream(
            _prompt(engine, pair, prompt),
            sampling={"temperature": 0, "max_tokens": pair.answer_tokens, "ignore_eos": True},
            reuse=ReuseOptions(namespace=who),
        )
        for pair, prompt, who in asked
    ]
    return [join(list(parts)) for parts in streams]


def _search(engine: Engine, pair: Pair, who: str) -> None:
    """A beam search over the pair's prompt, by vLLM's OpenAI layer."""
    fields: dict[str, Any] = {
        "max_tokens": min(pair.answer_tokens, 4),
        "use_beam_search": True,
        "n": 2,
        "temperature": 0,
    }
    prompt = _prompt(engine, pair, pair.first)
    engine.respond(prompt, fields=fields, reuse=ReuseOptions(namespace=who))


def _prompt(engine: Engine, pair: Pair, tokens: list[int]) -> Any:
    """OpenAI's layer is asked with text: it is the same for all requests of such a pair."""
    return engine.tokenizer.decode(tokens) if pair.kind == "beam" else tokens


def _tokens(report: ReuseReport) -> int:
    return report.cached_tokens + report.exact_tokens + report.reused_tokens


def _got(report: ReuseReport) -> str:
    """What a request got that was there before it, in words; empty for nothing."""
    if _tokens(report) or report.chunk_ids or report.served_by or report.donor:
        return repr(report)
    return ""
