"""Contexts in which most facts are told by reference to other facts, often in an earlier chunk.

    Vela is amber north .  gel is teal too  rak like gel ;      document 1, chunk 1
    pim like rak .  dos has pim Vela again  the old house too   document 1, chunk 2
    saw gel rak ;  fir like it .                                document 1, chunk 3

Every fact has a name and one or two words of value, and is told in one sentence:

* `root`: `NAME is WORD [WORD] END`, a dictionary entry;
* `chain`: `NAME like OTHER END`, the value of another fact, which may be told so itself;
* `coreference`: `NAME like it END`, where `it` is the proper name (written with a capital) last
  mentioned;
* `list`: `NAME has OTHER OTHER END`, the first word of each of two facts.

`ask NAME ?` is answered by the value and `<eos>`. A value stands, or has to be worked out, at the second
and third token behind the name: its two *carriers*. A fact is *cross* when working it out from the start
needs another chunk; about half of the told-by-reference facts are not. The five words that may end a
sentence also end sentences that refer to nothing, and names stand where nothing has to be worked out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from workbench.quality import words

Kind = Literal["root", "chain", "coreference", "list"]


@dataclass(frozen=True)
class Carrier:
    """A token at which one word of a fact's value has to be known.

    Attributes:
        position: of the token in the context.
        value: the word's number, `words.END_OF_ANSWER` if the value has no such word.
        depth: how many references stand between it and the word itself.
        cross: whether one of them leaves its chunk.
        source: the position of the carrier it refers to, -1 in a root.
        by_end: whether the reference is the token before it (it is itself the sentence's end).
        referent: where the proper name stands that `it` means, if that is the token or the one before
            it, else -1.
    """

    position: int
    value: int
    depth: int
    cross: bool
    source: int = -1
    by_end: bool = False
    referent: int = -1


@dataclass(frozen=True)
class Fact:
    """What one sentence tells about `name`; `hops` counts the chunk borders its references cross."""

    name: int
    kind: Kind
    value: tuple[int, ...]
    depth: int
    hops: int
    chunk: int
    document: int
    carriers: tuple[Carrier, Carrier]

    @property
    def cross(self) -> bool:
        """Whether the fact can't be worked out from its own chunk."""
        return self.hops > 0

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens behind `ask NAME ?`."""
        return (*self.value, words.END_OF_ANSWER)


@dataclass(frozen=True)
class Context:
    """One prompt's documents: tokens, and each token's chunk and document, counted over the prompt."""

    tokens: list[int]
    chunks: list[int]
    documents: list[int]
    facts: list[Fact]


@dataclass(frozen=True)
class Recipe:
    """How contexts are made; pairs are the lowest and the highest number.

    Attributes:
        sentences: facts told in each chunk.
        first_roots: roots in a document's first chunk.
        later_root: the chance that a later chunk begins with a root of its own.
        leave: the chance that a reference leaves its chunk where it can choose.
        filler: the chance of a sentence that tells nothing, before each that does.
    """

    documents: tuple[int, int] = (2, 2)
    chunks: tuple[int, int] = (2, 4)
    sentences: tuple[int, int] = (5, 7)
    first_roots: tuple[int, int] = (2, 3)
    later_root: float = 0.85
    depth: int = 3
    leave: float = 0.46
    lists: float = 0.25
    pronouns: float = 0.2
    filler: float = 0.06
    two_words: float = 0.7


FULL = Recipe()


@dataclass
class _Writer:
    """The context as it grows."""

    rng: random.Random
    recipe: Recipe
    held: bool
    tokens: list[int] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    known: list[Fact] = field(default_factory=list)
    chunk: int = -1
    document: int = -1
    latest_proper: int = -1
    """Where the proper name stands that was last mentioned in this document."""
    used: set[int] = field(default_factory=set)

    def name(self, proper: bool) -> int:
        plain = words.HELD_NAMES if self.held else words.NAMES
        capital = words.HELD_PROPER if self.held else words.PROPER
        pool = [w for w in (capital if proper else plain) if w not in self.used]
        word = self.rng.choice(pool)
        self.used.add(word)
        return word

    def put(self, *tokens: int) -> None:
        for token in tokens:
            if _is_proper(token):
                self.latest_proper = len(self.tokens)
            self.tokens.append(token)

    def end(self) -> int:
        return self.rng.choice(words.ENDS)

    def fill(self) -> None:
        """A sentence that tells nothing, with the same ends, and names where some are known."""
        plain = [f.name for f in self.known if not _is_proper(f.name)]
        if len(plain) > 1 and self.rng.random() < 0.5:
            self.put(words.SAW, *self.rng.sample(plain, 2), self.end())
        else:
            noun = self.rng.choice(words.NOUNS)
            self.put(words.THE, self.rng.choice(words.ADJECTIVES), noun, self.end())

    def add(self, fact: Fact) -> None:
        self.facts.append(fact)
        self.known.append(fact)

    def root(self, proper: bool) -> None:
        free = [w for w in words.VALUES if w not in self.used]
        value = tuple(self.rng.sample(free, 2 if self.rng.random() < self.recipe.two_words else 1))
        self.used.update(value)
        at, name = len(self.tokens), self.name(proper)
        self.put(name, words.IS, *value, self.end())
        second = value[1] if len(value) > 1 else words.END_OF_ANSWER
        carriers = (
            Carrier(at + 2, value[0], 0, cross=False),
            Carrier(at + 3, second, 0, cross=False),
        )
        self.add(Fact(name, "root", value, 0, 0, self.chunk, self.document, carriers))

    def choose(self, leave: bool, but: Fact | None = None) -> Fact | None:
        """A fact to refer to, in an earlier chunk or known from this one alone, all depths alike."""
        open_ = [f for f in self.known if f.depth < self.recipe.depth and f is not but]
        far = [f for f in open_ if f.chunk != self.chunk]
        near = [f for f in open_ if f.chunk == self.chunk and not f.cross]
        pool = (far if leave else near) or near or far
        if not pool:
            return None
        depth = self.rng.choice(sorted({f.depth for f in pool}))
        return self.rng.choice([f for f in pool if f.depth == depth])

    def refer(self) -> None:
        """A sentence told by reference; a root where there is nothing yet to refer to."""
        leave = self.rng.random() < self.recipe.leave
        other = self.choose(leave)
        if other is None:
            return self.root(proper=False)
        if self.rng.random() < self.recipe.lists:
            second = self.choose(leave, but=other)
            if second is not None:
                return self.list(other, second)
        named = {f.name: f for f in self.known if f.depth < self.recipe.depth}
        subject = self.tokens[self.latest_proper] if self.latest_proper >= 0 else -1
        if subject in named and self.rng.random() < self.recipe.pronouns:
            other = named[subject]
        return self.alias(other, pronoun=other.name == subject)

    def hops(self, other: Fact) -> int:
        return other.hops + (other.chunk != self.chunk)

    def alias(self, other: Fact, pronoun: bool) -> None:
        proper = self.rng.random() < 0.15
        referent = self.latest_proper if pronoun else -1
        if pronoun:
            proper = False  # the name before `it` would be what `it` means
        at, name = len(self.tokens), self.name(proper)
        self.put(name, words.LIKE, words.IT if pronoun else other.name, self.end())
        depth, hops = other.depth + 1, self.hops(other)
        carriers = (
            self.reference(at + 2, other.carriers[0], other, referent=referent),
            self.reference(at + 3, other.carriers[1], other, by_end=True, referent=referent),
        )
        kind: Kind = "coreference" if pronoun else "chain"
        fact = Fact(name, kind, other.value, depth, hops, self.chunk, self.document, carriers)
        self.add(fact)

    def list(self, one: Fact, two: Fact) -> None:
        at, name = len(self.tokens), self.name(proper=False)
        self.put(name, words.HAS, one.name, two.name, self.end())
        carriers = (
            self.reference(at + 2, one.carriers[0], one),
            self.reference(at + 3, two.carriers[0], two),
        )
        value = (one.value[0], two.value[0])
        depth, hops = max(one.depth, two.depth) + 1, max(self.hops(one), self.hops(two))
        self.add(Fact(name, "list", value, depth, hops, self.chunk, self.document, carriers))

    def reference(
        self, position: int, to: Carrier, fact: Fact, *, by_end: bool = False, referent: int = -1
    ) -> Carrier:
        cross = to.cross or fact.chunk != self.chunk
        return Carrier(position, to.value, to.depth + 1, cross, to.position, by_end, referent)


def _is_proper(token: int) -> bool:
    return token in _PROPER


_PROPER = frozenset(words.PROPER + words.HELD_PROPER)


def make_context(rng: random.Random, recipe: Recipe = FULL, *, held: bool = False) -> Context:
    """One context by chance, with `held` of names that are kept for evaluation."""
    writer = _Writer(rng, recipe, held)
    chunks: list[int] = []
    documents: list[int] = []
    for document in range(rng.randint(*recipe.documents)):
        writer.document, writer.known, writer.latest_proper = document, [], -1
        for place in range(rng.randint(*recipe.chunks)):
            writer.chunk += 1
            _write_chunk(writer, first=place == 0)
            new = len(writer.tokens) - len(chunks)
            chunks += [writer.chunk] * new
            documents += [document] * new
    return Context(writer.tokens, chunks, documents, writer.facts)


def _write_chunk(writer: _Writer, *, first: bool) -> None:
    rng, recipe = writer.rng, writer.recipe
    facts = rng.randint(*recipe.sentences)
    roots = rng.randint(*recipe.first_roots) if first else int(rng.random() < recipe.later_root)
    roots = min(roots, facts)
    order = [True] * (facts - roots) + [False] * (roots - 1)
    rng.shuffle(order)
    if roots:
        order.insert(0 if first else rng.randint(0, min(2, len(order))), False)
    for place, refers in enumerate(order):
        if rng.random() < recipe.filler:
            writer.fill()
        if refers:
            writer.refer()
        else:
            writer.root(proper=(first and place == 0) or rng.random() < 0.3)
