"""An engine that starts only when there is something to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from semkv_rag.corpus.capture import CaptureItem, Capturer, CaptureResult
from semkv_rag.errors import EngineError
from semkv_rag.store import KVStore


class LazyCapturer:
    """A `Capturer` whose engine is started by any use but for `store` and `fingerprint`.

    A run over unchanged documents needs nothing else, and so costs no start-up.

    Args:
        store: the store the engine will write to.
        fingerprint: gives the fingerprint the engine will have; called once at most.
        start: starts the engine; called once at most. Whoever passes it closes the engine.
    """

    def __init__(
        self, store: KVStore, *, fingerprint: Callable[[], str], start: Callable[[], Capturer]
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._start = start

    @property
    def store(self) -> KVStore:
        return self._store

    @cached_property
    def fingerprint(self) -> str:
        return self._fingerprint()

    @cached_property
    def _engine(self) -> Capturer:
        engine = self._start()
        if engine.fingerprint != self.fingerprint:
            # Its chunks would be filed under a model that nobody asked about.
            raise EngineError(
                f"the engine runs as model {engine.fingerprint[:16]}, "
                f"not as {self.fingerprint[:16]} as was worked out before it started"
            )
        return engine

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        return self._engine.kv_bytes_per_token

    def capture(
        self, items: Iterable[CaptureItem], *, in_flight: int = 64
    ) -> Iterator[CaptureResult]:
        return self._engine.capture(items, in_flight=in_flight)
