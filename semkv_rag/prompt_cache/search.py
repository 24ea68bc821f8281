"""One look-up through the tiers of the prompt cache; `cascade` describes the tiers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from semkv_rag.prompt_cache.guarding import Guarding
from semkv_rag.prompt_cache.lookup import (
    EXACT,
    SEMANTIC,
    SEMANTIC_LAYER,
    Asked,
    Candidate,
    Lookup,
    tier_of,
)
from semkv_rag.prompt_cache.options import PromptCacheOptions
from semkv_rag.prompt_cache.vectors.encoders import Encoder, KeyedEncoder
from semkv_rag.prompt_cache.vectors.index import Vectors, normalised
from semkv_rag.prompt_cache.vectors.layers import LayerIndexes
from semkv_rag.report import Explored, Status
from semkv_rag.store import KVStore, VectorKey


@dataclass(frozen=True)
class Parts:
    """What all look-ups of a cascade share.

    Attributes:
        model: the fingerprint whose prompts are searched.
        encoders: of each layer; `indexes` has the same layers.
    """

    store: KVStore
    model: str
    options: PromptCacheOptions
    encoders: Mapping[VectorKey, Encoder]
    indexes: LayerIndexes
    guard: Guarding


def encode(encoder: Encoder, asked: Asked) -> Vectors | None:
    """A prompt's vector, [dim], of length 1, or None when the encoder has nothing to read in it."""
    items: Sequence[object] = [asked.text] if encoder.reads == "text" else asked.images
    # Of several images it could not be said which is like which.
    if len(items) != 1 or (encoder.reads == "image" and len(asked.image_keys) != 1):
        return None
    if isinstance(encoder, KeyedEncoder):
        made = encoder.encode_image(asked.images[0], asked.namespace, asked.image_keys[0])
    else:
        made = encoder.encode(items)
    vector: Vectors = normalised(made)[0]
    return vector


class Search:
    """A look-up: made, run once, asked for its result."""

    def __init__(self, parts: Parts, asked: Asked) -> None:
        self._started = time.perf_counter()
        self._parts = parts
        self._asked = asked
        semantic = [key for key in parts.encoders if key.layer == SEMANTIC_LAYER]
        embedding = [key for key in parts.encoders if key.layer != SEMANTIC_LAYER]
        self._tiers = (embedding, semantic)
        self._statuses: dict[str, Status] = {EXACT: "skip", SEMANTIC: "skip"}
        self._statuses |= {tier_of(key.layer): "skip" for key in embedding}
        self._candidates: list[Candidate] = []
        self._reasons: dict[str, str] = {}
        self._vectors: dict[VectorKey, Vectors] = {}
        self._encode_s = 0.0
        self._served: Candidate | None = None
        self._explore: Candidate | None = None
        self._tokens = asked.tokens
        self._identical = False

    def run(self, *, every_tier: bool) -> None:
        """Ask the tiers in their order, until one serves or is explored."""
        self._exact()
        for keys in self._tiers:
            if every_tier or not self._decided:
                self._layers(keys)

    def result(self) -> Lookup:
        """What was found."""
        return Lookup(
            asked=self._asked,
            statuses=self._statuses,
            served=self._served,
            tokens=self._tokens,
            identical=self._identical,
            near_image=self._near_image(),
            explored=self._explored(),
            candidates=tuple(self._candidates),
            reasons=self._reasons,
            vectors=self._vectors,
            encode_ms=1000 * self._encode_s,
            lookup_ms=1000 * (time.perf_counter() - self._started),
        )

    def _explored(self) -> Explored | None:
        if self._explore is None or self._explore.key is None:
            return None
        key, donor = self._explore.key, self._explore.donor
        return Explored(donor.namespace, donor.id, key.layer, key.encoder, self._explore.similarity)

    def _near_image(self) -> str | None:
        served = self._served
        if served is None or served.key is None or not self._parts.options.near_images:
            return None
        seen = self._parts.encoders[served.key].reads == "image"
        return (
            served.donor.images
            if seen and served.donor.images != self._asked.images_digest
            else None
        )

    @property
    def _decided(self) -> bool:
        return self._served is not None or self._explore is not None

    def _exact(self) -> None:
        self._statuses[EXACT] = "miss"
        try:
            candidates = self._with_same_text()
        except Exception as error:
            self._reasons[EXACT] = _in_words(error)
            return
        self._candidates += candidates
        self._served = next((found for found in candidates if found.stopped is None), None)
        if self._served is not None:
            self._statuses[EXACT] = "hit"

    def _with_same_text(self) -> list[Candidate]:
        """The stored prompts of the same key, the one of the same tokens first, then the newest."""
        parts, asked = self._parts, self._asked
        donors = parts.store.prompts.with_key(parts.model, asked.namespace, asked.key)
        found = [
            Candidate(EXACT, donor, 1.0, parts.guard.same_source(asked, donor)) for donor in donors
        ]
        found.sort(key=lambda candidate: candidate.donor.id != asked.id)
        self._identical = any(one.donor.id == asked.id and one.stopped is None for one in found)
        return found

    def _layers(self, keys: Sequence[VectorKey]) -> None:
        """Ask layers that are one tier; the candidate furthest above its threshold is taken."""
        possible: list[Candidate] = []
        for key in keys:
            tier = tier_of(key.layer)
            try:
                vector = self._encode(key)
                if vector is None:
                    continue
                self._statuses[tier] = "miss"
                candidates = self._nearest(key, vector)
            except Exception as error:
                self._statuses[tier] = "miss"
                self._reasons[tier] = _in_words(error)
                continue
            self._candidates += candidates
            unstopped = [candidate for candidate in candidates if candidate.stopped is None]
            if unstopped:
                self._statuses[tier] = "hit"
                possible.append(unstopped[0])
        if possible and not self._decided:
            self._serve(max(possible, key=self._margin))
        if possible and self._served not in possible:
            for candidate in possible:
                self._statuses[candidate.tier] = "miss"

    def _encode(self, key: VectorKey) -> Vectors | None:
        started = time.perf_counter()
        try:
            vector = encode(self._parts.encoders[key], self._asked)
        finally:
            self._encode_s += time.perf_counter() - started
        if vector is not None:
            self._vectors[key] = vector
        return vector

    def _nearest(self, key: VectorKey, vector: Vectors) -> list[Candidate]:
        """The candidates of one layer, the most similar first."""
        parts, asked = self._parts, self._asked
        parts.indexes.refresh()
        near = parts.indexes.search(asked.namespace, key, vector, parts.options.top_k)
        donors = parts.store.prompts.get(parts.model, asked.namespace, [id_ for id_, _ in near])
        reads = parts.encoders[key].reads
        return [
            Candidate(
                tier=tier_of(key.layer),
                donor=donors[id_],
                similarity=similarity,
                stopped=parts.guard.stopped(asked, donors[id_], similarity, key.layer, reads),
                key=key,
            )
            for id_, similarity in near
            if id_ in donors  # it may have gone meanwhile
        ]

    def _margin(self, candidate: Candidate) -> float:
        assert candidate.key is not None
        return candidate.similarity - self._parts.options.threshold_of(candidate.key.layer)

    def _serve(self, candidate: Candidate) -> None:
        """Serve a candidate, or explore it.

        With `substitute` just one candidate of a request is put before the policy: with more, each
        would bring its own share of errors. A prompt with images is always aligned: the donor's
        tokens are nothing without its images.
        """
        if self._parts.options.reuse == "aligned" or self._asked.image_keys:
            self._served = candidate
            return
        assert candidate.key is not None
        decision = self._parts.guard.decide(self._asked, candidate, candidate.key)
        if decision.serve and self._send(candidate):
            self._served = candidate
            return
        stopped = decision.reason if not decision.serve else "its tokens are gone"
        explored = replace(candidate, stopped=stopped)
        self._candidates[self._candidates.index(candidate)] = explored
        self._explore = explored

    def _send(self, candidate: Candidate) -> bool:
        """Send the donor's tokens; False when they cannot be had."""
        parts, namespace, id_ = self._parts, self._asked.namespace, candidate.donor.id
        try:
            stored = parts.store.tokens(parts.model, namespace, [id_]).get(id_)
        except Exception as error:
            self._reasons[candidate.tier] = _in_words(error)
            return False
        if stored is None:
            return False
        self._tokens = stored.tokens
        return True


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
