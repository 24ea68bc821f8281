"""What the store hands out: plain values, valid after the store is closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Which chunk: its content address and whose it is."""

    id: str
    model: str
    namespace: str


@dataclass(frozen=True, slots=True)
class ChunkRecord(ChunkKey):
    """A chunk's row in the index.

    Attributes:
        kind: `document`, `head` (a prompt prefix) or `prompt`.
        token_count: its tokens, and so its rows of KV.
        context_count: tokens to its left when it was computed; the position of its first token.
        bytes: size of its files, all ranks together.
        created_at, used_at: seconds since the epoch.
        ranks: its files, one for each tensor-parallel rank.
        codec: how its KV stands in them.
        context: the digest of the tokens to its left when it was computed.
    """

    kind: str
    token_count: int
    context_count: int
    bytes: int
    created_at: float
    used_at: float
    ranks: int = 1
    codec: str = "plain"
    context: str = ""


@dataclass(frozen=True, slots=True)
class RecodeReport:
    """What `KVStore.recode` did, or would do.

    Attributes:
        recoded: chunks that have the codec now.
        unchanged: that had it before.
        bytes_before, bytes_after: of all of them.
        failures: id and reason of chunks that could not be recoded, and are as they were.
    """

    recoded: int
    unchanged: int
    bytes_before: int
    bytes_after: int
    failures: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StateRecord:
    """The row of an image's features in the index: what a model's projector made of one image.

    Attributes:
        id: its address, made of the three that follow.
        model, namespace: whose it is.
        key: which image.
        rows: image tokens that it stands for; `width` numbers of `dtype` each.
        bytes: size of its file.
        created_at, used_at: seconds since the epoch.
    """

    id: str
    model: str
    namespace: str
    key: str
    rows: int
    width: int
    dtype: str
    bytes: int
    created_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that wrote to the store: its fingerprint and what that stands for."""

    fingerprint: str
    description: Mapping[str, str]
    created_at: float


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A document and the chunks it was split into, in its order.

    A chunk that was evicted stays listed, so that the document is seen to be incomplete: `get` says
    which are still there.

    Attributes:
        name: the document's name, such as its path.
        digest: of what was read, so that an unchanged document is known.
        chunk_ids: its chunks.
        updated_at: seconds since the epoch.
        model, namespace: for whom it was precomputed.
        pinned: whether its chunks stay until they are removed by name.
    """

    name: str
    digest: str
    chunk_ids: tuple[str, ...]
    updated_at: float
    model: str
    namespace: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A chunk came (`added`) or went."""

    namespace: str
    chunk_id: str
    added: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since a point of the feed.

    Attributes:
        last: the point up to which this tells; the next call's `since`.
        entries: oldest first; a chunk may come and go several times.
        reset: the entries are all live chunks, and whatever the caller knew besides is gone: it asked
            from 0, from before what the feed still holds, or the index is another one.
    """

    last: int
    entries: list[Change]
    reset: bool = False


@dataclass(frozen=True, slots=True)
class PromptRecord(ChunkKey):
    """What is known of a chunk that is a whole prompt.

    Attributes:
        key: digest of its normalised text and of its images, 64 hex digits.
        text: as it was asked.
        images: digest of its images, empty when it had none.
        source_version: of whatever the prompt was made from, by the caller's own naming.
        created_at: seconds since the epoch.
    """

    key: str
    text: str
    images: str
    source_version: str
    created_at: float


@dataclass(frozen=True, slots=True)
class VectorKey:
    """Which vectors can be compared: those of one layer, made by the same encoder."""

    layer: str
    encoder: str


@dataclass(frozen=True, slots=True)
class VectorChanges:
    """Which prompts' vectors came and went since a point of the feed.

    Attributes:
        last: the point up to which this tells; the next call's `since`.
        removed: namespaces and ids of chunks that went; to be taken in before `added`.
        added: namespace, layer and encoder, and chunk id of vectors that came, oldest first.
        reset: `added` are all there are, and whatever the caller knew besides is gone.
    """

    last: int
    removed: list[tuple[str, str]]
    added: list[tuple[str, VectorKey, str]]
    reset: bool = False


@dataclass(frozen=True, slots=True)
class StoredOutcome:
    """What came of one explored request: whether the donor's answer would have done.

    Attributes:
        similarity: of the prompt to the donor, -1 to 1.
        correct: see above.
        at: seconds since the epoch.
    """

    similarity: float
    correct: bool
    at: float


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Counts of what one model has stored in one namespace.

    Attributes:
        chunks: stored chunks, of `tokens` tokens together.
        sources: documents.
        states: images' features.
        bytes: of the files of chunks and states.
    """

    model: str
    namespace: str
    chunks: int
    sources: int
    tokens: int
    bytes: int
    states: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """What a namespace or the whole store may hold, and for how long.

    Attributes:
        namespace: None for the whole store.
        max_bytes: what its files may take together; None for no limit.
        ttl_s: seconds since its last use after which a chunk goes; None for no limit, and of a
            namespace for the store's.
    """

    namespace: str | None
    max_bytes: int | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pin:
    """What is neither evicted nor expires: all that is of a model, a namespace, a document.

    Attributes:
        model, namespace, source: None is any; a document is named with its namespace.
    """

    model: str | None = None
    namespace: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken away, or would be.

    Attributes:
        sources: documents.
        states: images' features.
        bytes: of the files of chunks and states.
        pinned: those of the chunks that were pinned.
    """

    sources: int = 0
    chunks: int = 0
    states: int = 0
    bytes: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection took away, or would.

    Attributes:
        models: of the models that were named.
        expired: what was unused for longer than its time to live.
        over: what was evicted because a limit was exceeded.
    """

    models: Taken
    expired: Taken
    over: Taken


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `verify` found.

    Attributes:
        kind: `missing` or `damaged` (a promised file, or the index), `stale` (a sound file of whose
            size or kind the index says something else), `orphan` (a sound file that the index does not
            know, or that a newer version wrote) or `debris` (what is of no use: a broken file, a link).
        path: the file, relative to the store's root, or `index`. What a terminal would not print is
            escaped, here and in `text`.
        text: what is wrong, in words.
    """

    kind: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` and `rebuild_index` saw.

    Attributes:
        chunks: promised chunks that were looked at.
        bytes: of the sound files of chunks and states.
        problems: promises that are not kept: chunks and states that are missing or damaged.
        notices: harmless finds, such as a file of a killed writer that the index does not know yet.
        repaired: whether what was found was mended.
        states: promised features that were looked at.
    """

    chunks: int
    bytes: int
    problems: tuple[Problem, ...]
    notices: tuple[Problem, ...]
    repaired: bool
    states: int = 0

    @property
    def ok(self) -> bool:
        """Every promise is kept."""
        return not self.problems
