"""What precompute asks of an engine: run these tokens, write their KV.

`semkv_rag.engine.Engine` is the `Capturer` of this package. It only writes chunk files; whoever
asked adds the index rows, once the results are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from semkv_rag.reuse.tokens import TokenArray
from semkv_rag.store import KVStore

CAPTURING_ARGS: Final = {"disable_hybrid_kv_cache_manager": True}
"""vLLM's options of an engine that computes chunks and answers nobody, where no others are given.

In a model with sliding windows vLLM's hybrid KV cache manager keeps a prompt's end alone in its prefix
cache: what chunks have in common on their left is computed again and again.
"""


@dataclass(frozen=True, slots=True, eq=False)
class CaptureItem:
    """One chunk whose KV is to be computed.

    Attributes:
        id: the chunk's content address, `chunk_id(model, namespace, context, tokens)`.
        namespace: the tenant it belongs to.
        kind: `document`, `head` (a prompt prefix) or `prompt`, as the store writes it.
        tokens: the chunk's tokens, [tokens].
        context: the tokens to stand to its left while it is computed, [tokens]; may be empty.
        reference: another context, [tokens]: its V are computed behind this one too, and how much
            they differ is stored with the chunk. None: nothing is compared.
    """

    id: str
    namespace: str
    kind: str
    tokens: TokenArray
    context: TokenArray
    reference: TokenArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CaptureResult:
    """What became of one item.

    Attributes:
        item: the item.
        bytes: size of its chunk file, over all ranks.
        error: in words, why nothing was written; None when it was.
    """

    item: CaptureItem
    bytes: int
    error: str | None = None


class Capturer(Protocol):
    """An engine that writes the KV of chunks into its store."""

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint: it differs where anything that changes KV does."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        ...

    @property
    def max_model_len(self) -> int:
        """The model's context window, in tokens."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token's KV takes in the store, over all layers and ranks."""
        ...

    @property
    def store(self) -> KVStore | None:
        """Where the chunk files are written; None when the engine was started without one."""
        ...

    def capture(
        self, items: Iterable[CaptureItem], *, in_flight: int = 64
    ) -> Iterator[CaptureResult]:
        """Compute and write each item, up to `in_flight` at once; results as they complete.

        `items` is taken from as room comes free, in the thread that asks for results. An item that
        cannot be written comes back with its `error`, and the rest goes on.
        """
        ...
