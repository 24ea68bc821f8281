"""The guard over stored candidates: what stops one before its similarity counts, and who may serve.

For `aligned` every token that differs is computed, so a candidate is stopped only where equal tokens
would not mean the same: other images, another version of the source. For `substitute` the donor's
question is answered, so the differences in meaning are vetoes, and vCache's policy has the last word.
Whatever fails in here stops the candidate.
"""

from __future__ import annotations

import threading

import numpy as np

from semkv_rag.prompt_cache.guard import Decision, Outcome, decide, veto
from semkv_rag.prompt_cache.lookup import Asked, Candidate
from semkv_rag.prompt_cache.options import PromptCacheOptions
from semkv_rag.prompt_cache.vectors.encoders import Reads
from semkv_rag.store import KVStore, PromptRecord, VectorKey


class Guarding:
    """The guard of one cascade; safe for threads.

    Args:
        model: the fingerprint whose prompts are judged.
        rng: of the policy's exploration.
    """

    def __init__(
        self, store: KVStore, model: str, options: PromptCacheOptions, rng: np.random.Generator
    ) -> None:
        self._store = store
        self._model = model
        self._options = options
        self._rng = rng
        self._lock = threading.Lock()  # generators are not safe for threads

    def same_source(self, asked: Asked, donor: PromptRecord) -> str | None:
        """Why a donor is of another source, in words, or None."""
        if donor.source_version == asked.source_version:
            return None
        return f"source version {donor.source_version!r}, not {asked.source_version!r}"

    def stopped(
        self, asked: Asked, donor: PromptRecord, similarity: float, layer: str, reads: Reads
    ) -> str | None:
        """What stops a candidate that a layer found, in words, or None."""
        try:
            if (reason := self.same_source(asked, donor)) is not None:
                return reason
            # How alike images are is for a layer that sees them.
            if reads == "text" and donor.images != asked.images_digest:
                return "other images"
            if self._options.reuse == "substitute":
                found = veto(donor.text, asked.text)
                if found is not None:
                    return f"{found.reason}: {found.donor!r}, not {found.prompt!r}"
        except Exception as error:
            return f"the guard failed ({type(error).__name__}: {error})"
        threshold = self._options.threshold_of(layer)
        if similarity < threshold:
            return f"similarity {similarity:.3f} is below {threshold:g}"
        return None

    def decide(self, asked: Asked, candidate: Candidate, key: VectorKey) -> Decision:
        """Whether a candidate that nothing stopped may answer in place of the prompt."""
        try:
            stored = self._store.prompts.outcomes(
                self._model, asked.namespace, candidate.donor.id, key
            )
            outcomes = [Outcome(outcome.similarity, outcome.correct) for outcome in stored]
        except Exception as error:
            return Decision(False, 0.0, f"outcomes cannot be read ({error})")
        with self._lock:
            return decide(outcomes, candidate.similarity, self._options.delta, self._rng)
