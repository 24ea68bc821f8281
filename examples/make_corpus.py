"""Writes `examples/corpus`: short documents in the reader's grammar, and questions about them.

    python examples/make_corpus.py [FOLDER]

The folder (`examples/corpus` when left out) then holds a folder for each kind of organisation, in it a
text file for each organisation, one paragraph per chunk, and `questions.json`. The same version of this
file writes the same bytes everywhere: the corpus in the repository is what it writes.

Only the first paragraph of a document names the organisation; the others say "It". All documents of a
kind tell the same relations, each with another value. So a fact's chunk alone does not tell whom the
fact is about, which is what is lost when the KV of chunks is used as it was computed apart.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SEED = 1

KINDS = {
    "club": "clubs",
    "company": "companies",
    "lab": "labs",
    "museum": "museums",
    "project": "projects",
    "school": "schools",
    "studio": "studios",
    "team": "teams",
}
DOCUMENTS_PER_KIND = 5
RELATIONS_PER_KIND = 6
QUESTIONS_PER_DOCUMENT = 2

# Tokens (blank-separated words) of a paragraph. Any two neighbours together have more than one may
# have, so that a splitter with MAX_CHUNK_TOKENS cuts between any two paragraphs, and nowhere else.
MIN_CHUNK_TOKENS = 14
MAX_CHUNK_TOKENS = 32


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_SYLLABLES = _words("""
    Hur Nas Zot Las Bot Gras Ner Ral Bul Tet Bux Zo Mix Mok Bo Shan Shir Rut Trek Pus Trol Bret Vem
    Stir Zur Kut Sol Brak Grut Shen Trel Lu Mo Sum Zi Grat Tre Stet Dom Klux Tros Som Bu Grum Zul Me
    Kler Stil Fal Zak Mir Grem Pan Ki Kik Zis Bral Pom Vek Gi Lut Bel Tel Ko
""")
SECOND_SYLLABLES = _words("""
    dar sek nux gran vo sus tril bis rot tre kex bem ke tri stes vum klim zet zux bris trum zom klus
    brem kuk brik tru trut pes trir rax gal gun nex dol dim kel far bal sin bol mel bir pis stul non
    brer ral ze klos trin rik grol stel nan ker dex zak fux grum nok tran dot ka
""")


@dataclass(frozen=True)
class Relation:
    """What can be told of an organisation: two phrasings, a question, one-word values."""

    phrasings: tuple[str, str]
    question: str
    values: tuple[str, ...]


RELATIONS: Mapping[str, Relation] = {
    "start": Relation(
        ("was launched in {}", "began in {}"),
        "when was {} launched ?",
        tuple(str(year) for year in range(1940, 2020)),
    ),
    "place": Relation(
        ("is based in {}", "has its office in {}"),
        "where is {} based ?",
        _words(
            "Oslo Rome Paris Lima Cairo Delhi Tokyo Seoul Quito Accra Lagos Milan Turin Basel Bern "
            "Graz Linz Sofia Varna Minsk Riga Tartu Turku Espoo Lund Bergen Leeds York Bath Derby "
            "Cork Galway Lyon Nice Lille Metz Dijon Porto Faro Braga Madrid Bilbao Boston Denver"
        ),
    ),
    "lead": Relation(
        ("is led by {}", "is headed by {}"),
        "who leads {} ?",
        _words(
            "Kim Ann Bob Carl Dora Emil Finn Gina Hugo Ivan Jane Kurt Lena Mark Nora Otto Paul Rita "
            "Sven Tara Ulla Vera Wade Yuri Zoe Alan Cora Dean Ella Fred Gwen Hans Jack Kate Liam"
        ),
    ),
    "fund": Relation(
        ("is funded by {}", "gets its money from {}"),
        "who funds {} ?",
        _words(
            "Acme Bolt Cargo Delta Ember Fabel Gamma Helix Indigo Jolt Krypt Lotus Matrix Nexus Orbit "
            "Pixel Quark Raven Sigma Titan Umbra Vertex Willow Zephyr Apex Beacon Cobalt Falcon"
        ),
    ),
    "topic": Relation(
        ("works on {}", "deals with {}"),
        "what does {} work on ?",
        _words(
            "copper steel glass paper cotton wool sugar coffee tea salt bread cheese honey olives "
            "grapes apples maps clocks lamps chairs boats trains planes robots lasers magnets "
            "engines pumps bridges tunnels canals rivers glaciers deserts forests birds whales"
        ),
    ),
    "size": Relation(
        ("has {} members", "employs {} people"),
        "how many people are in {} ?",
        tuple(str(number) for number in range(11, 91)),
    ),
    "color": Relation(
        ("uses a {} logo", "has a {} flag"),
        "what color is the logo of {} ?",
        _words(
            "red blue green yellow orange purple pink brown black white gray gold silver violet "
            "scarlet teal ivory amber crimson navy"
        ),
    ),
    "mascot": Relation(
        ("keeps a {} as mascot", "has a {} as mascot"),
        "which mascot does {} have ?",
        _words(
            "lion tiger eagle bear fox owl hawk deer otter badger panda zebra camel moose bison lynx "
            "raven swan heron crane"
        ),
    ),
}

SUBJECTS = ("It", "The {}", "Today it", "Since then the {}", "In fact it", "As planned the {}")
SUBJECT_WEIGHTS = (5, 3, 1, 1, 1, 1)
FILLERS = (
    "The {adjective} {noun} was {other_adjective} that day .",
    "Many visitors like the {adjective} {noun} .",
    "There is a {adjective} {noun} near the {other_noun} .",
    "Some people prefer the {noun} in the {other_noun} .",
    "Rain fell on the {adjective} {noun} .",
    "Nobody knows why the {noun} was {adjective} .",
)
FILLER_SHARE = 0.1
ADJECTIVES = _words("old new small large quiet busy bright dark warm cold early late simple rare")
NOUNS = _words(
    "road market garden window river bank house kitchen station hill valley tower library"
)


@dataclass(frozen=True)
class Question:
    """A question of `questions.json`.

    Attributes:
        question: without "Question :", as a user would ask it.
        answer: the one right word.
        source: the document that has it, as a path from the corpus folder.
        cross: the chunk with the fact does not name whom it is about.
    """

    question: str
    answer: str
    source: str
    cross: bool


@dataclass(frozen=True)
class Fact:
    relation: str
    value: str


@dataclass(frozen=True)
class Sentence:
    text: str
    fact: Fact | None = None

    @property
    def tokens(self) -> int:
        return len(self.text.split())


@dataclass
class Document:
    """An organisation: its paragraphs, each a list of sentences."""

    name: str
    kind: str
    paragraphs: list[list[Sentence]] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"{KINDS[self.kind]}/{self.name.lower().replace(' ', '-')}.txt"

    @property
    def text(self) -> str:
        paragraphs = (" ".join(sentence.text for sentence in part) for part in self.paragraphs)
        return "\n\n".join(paragraphs) + "\n"


def make_documents(seed: int = SEED) -> list[Document]:
    """All documents of a corpus, kind by kind."""
    rng = random.Random(seed)
    names = _names(rng, len(KINDS) * DOCUMENTS_PER_KIND)
    documents = []
    for kind in KINDS:
        relations = rng.sample(sorted(RELATIONS), RELATIONS_PER_KIND)
        values = {
            relation: rng.sample(RELATIONS[relation].values, DOCUMENTS_PER_KIND)
            for relation in relations
        }
        for number in range(DOCUMENTS_PER_KIND):
            facts = [Fact(relation, values[relation][number]) for relation in relations]
            documents.append(_document(rng, names.pop(), kind, facts))
    return documents


def make_questions(documents: Sequence[Document], seed: int = SEED) -> list[Question]:
    """Some questions about each document, in random order; every other one is `cross`."""
    rng = random.Random(seed)
    questions = []
    for document in documents:
        named, cross = _facts(document)
        for number in range(QUESTIONS_PER_DOCUMENT):
            facts = cross if number % 2 == 0 else named
            fact = facts.pop(rng.randrange(len(facts)))
            asked = RELATIONS[fact.relation].question.format(document.name)
            questions.append(Question(asked, fact.value, document.path, facts is cross))
    rng.shuffle(questions)
    return questions


def write_corpus(folder: Path, seed: int = SEED) -> None:
    """Write the documents and `questions.json` into `folder`."""
    documents = make_documents(seed)
    for document in documents:
        path = folder / document.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document.text, encoding="utf-8")
    questions = [asdict(question) for question in make_questions(documents, seed)]
    text = json.dumps(questions, indent=1, ensure_ascii=False) + "\n"
    (folder / "questions.json").write_text(text, encoding="utf-8")


def _names(rng: random.Random, count: int) -> list[str]:
    """Names that share no first and no second syllable, of pairs not seen in the reader's training."""
    names: list[str] = []
    firsts = rng.sample(range(len(FIRST_SYLLABLES)), count)
    seconds = rng.sample(range(len(SECOND_SYLLABLES)), len(SECOND_SYLLABLES))
    for first in firsts:
        second = next(second for second in seconds if (7 * first + 13 * second) % 10 == 0)
        seconds.remove(second)
        names.append(f"{FIRST_SYLLABLES[first]} {SECOND_SYLLABLES[second]}")
    return names


def _document(rng: random.Random, name: str, kind: str, facts: Sequence[Fact]) -> Document:
    """Try until the sentences fall into two or three paragraphs of the right sizes."""
    while True:
        limit = rng.randint(MAX_CHUNK_TOKENS - 8, MAX_CHUNK_TOKENS)
        paragraphs = _paragraphs(_sentences(rng, name, kind, facts), limit)
        sizes = [sum(sentence.tokens for sentence in part) for part in paragraphs]
        together = [left + right for left, right in pairwise(sizes)]
        in_range = min(sizes) >= MIN_CHUNK_TOKENS and max(sizes) <= MAX_CHUNK_TOKENS
        if in_range and 2 <= len(sizes) <= 3 and min(together) > MAX_CHUNK_TOKENS:
            return Document(name, kind, paragraphs)


def _sentences(rng: random.Random, name: str, kind: str, facts: Sequence[Fact]) -> list[Sentence]:
    sentences: list[Sentence] = []
    for fact in rng.sample(facts, len(facts)):
        subject = rng.choices(SUBJECTS, SUBJECT_WEIGHTS)[0].format(kind)
        if not sentences:
            subject = f"The {name} {kind}"
        phrase = rng.choice(RELATIONS[fact.relation].phrasings).format(fact.value)
        sentences.append(Sentence(f"{subject} {phrase} .", fact))
        if rng.random() < FILLER_SHARE:
            adjective, other_adjective = rng.sample(ADJECTIVES, 2)
            noun, other_noun = rng.sample(NOUNS, 2)
            text = rng.choice(FILLERS).format(
                adjective=adjective, other_adjective=other_adjective,
                noun=noun, other_noun=other_noun,
            )  # fmt: skip
            sentences.append(Sentence(text))
    return sentences


def _paragraphs(sentences: Sequence[Sentence], tokens: int) -> list[list[Sentence]]:
    """Cut before the sentence that would make a paragraph longer than `tokens`."""
    paragraphs: list[list[Sentence]] = [[]]
    for sentence in sentences:
        size = sum(other.tokens for other in paragraphs[-1])
        if size + sentence.tokens > tokens:
            paragraphs.append([])
        paragraphs[-1].append(sentence)
    return paragraphs


def _facts(document: Document) -> tuple[list[Fact], list[Fact]]:
    """The facts of the first paragraph, which has the name, and those of the others."""
    facts = [[s.fact for s in part if s.fact] for part in document.paragraphs]
    return facts[0], [fact for part in facts[1:] for fact in part]


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]) if len(sys.argv) > 1 else CORPUS)
