"""The tiers over whole prompts: exact text, then embedding layers, then sentence similarity.

A stored prompt is a donor, never an answer. The cascade says which stored prompt a new one resembles
and what to send to the model; the KV itself is found by its tokens, like that of any chunk. Asked
before each request, by any number of threads. No fault of the store, of an encoder or of an index
fails a look-up: the tier misses, and the reason is in the answer.
"""

from __future__ import annotations

import logging
import numbers
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from semkv_rag.closing import Closing
from semkv_rag.config import DEFAULT_NAMESPACE, check_namespace
from semkv_rag.errors import OptionError, SemKVError
from semkv_rag.prompt_cache.guarding import Guarding
from semkv_rag.prompt_cache.lookup import SEMANTIC_LAYER, Asked, Explanation, Lookup
from semkv_rag.prompt_cache.options import PromptCacheOptions
from semkv_rag.prompt_cache.search import Parts, Search, encode
from semkv_rag.prompt_cache.vectors.encoders import Encoder, SentenceEncoder
from semkv_rag.prompt_cache.vectors.index import VectorIndex, Vectors
from semkv_rag.prompt_cache.vectors.layers import LayerIndexes
from semkv_rag.report import Explored
from semkv_rag.reuse import TokenArray, token_array
from semkv_rag.store import KVStore, PromptRecord, VectorKey
from semkv_rag.unicode_text import is_unicode, not_unicode

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)


class Cascade(Closing):
    """Finds donors among one model's stored prompts. Safe for threads.

    All stored vectors are read when it is made: three seconds for 100,000.

    Args:
        store: where the prompts are; not closed with the cascade.
        fingerprint: of the model, as `Engine.fingerprint`.
        options: see there.
        encoders: by layer. The layer `semantic` is the semantic tier, every other one is a layer of
            the embedding tier. By default the MiniLM for `semantic` and no other.
        rng: what the guard explores by; the same one, the same decisions.
    """

    def __init__(
        self,
        store: KVStore,
        fingerprint: str,
        options: PromptCacheOptions | None = None,
        encoders: Mapping[str, Encoder] | None = None,
        *,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.options = options or PromptCacheOptions()
        self._store = store
        self._model = fingerprint
        self._layers = {SEMANTIC_LAYER: SentenceEncoder()} if encoders is None else encoders
        self.options.check_layers(self._layers)
        self._encoders = {
            VectorKey(layer, encoder.name): encoder for layer, encoder in self._layers.items()
        }
        self._indexes = LayerIndexes(store, fingerprint, self._encoders)
        self._rng = rng = np.random.default_rng() if rng is None else rng
        self._parts = Parts(
            store=store,
            model=fingerprint,
            options=self.options,
            encoders=self._encoders,
            indexes=self._indexes,
            guard=Guarding(store, fingerprint, self.options, rng),
        )
        try:
            self._indexes.refresh()
        except SemKVError as error:
            logger.warning("the tiers' vectors cannot be read yet: %s", error)

    def of_model(self, fingerprint: str) -> Cascade:
        """One with the same options and encoders, over another model's stored prompts."""
        return Cascade(self._store, fingerprint, self.options, self._layers, rng=self._rng)

    def load(self) -> None:
        """Load the encoders of texts and FAISS now, and not in the first look-up.

        Raises:
            MissingExtraError: what one needs is not installed.
        """
        for encoder in self._encoders.values():
            VectorIndex(len(encoder.encode(["."])[0]) if encoder.reads == "text" else 1)

    @property
    def encoders(self) -> list[Encoder]:
        """One for each layer."""
        return list(self._encoders.values())

    # ---- before a request ------------------------------------------------------------------

    def lookup(
        self,
        text: str,
        tokens: Sequence[int] | TokenArray,
        namespace: str = DEFAULT_NAMESPACE,
        images: Sequence[Image] | None = None,
        *,
        image_keys: Sequence[str] | None = None,
        source_version: str = "",
    ) -> Lookup:
        """The donor of a prompt, and what to send to the model.

        Args:
            text: the prompt's.
            tokens: the prompt's, [tokens]; those of images as `tell_images_apart` gives them.
            namespace: whose stored prompts may be donors.
            images: that the prompt holds, for the encoders of image layers; may be fewer.
            image_keys: digests of what the prompt's images show, 64 hex digits each; by default those
                of the pixels of `images`.
            source_version: only prompts stored with the same one may be donors.

        Raises:
            OptionError: the namespace cannot be one, text or source version are no texts, or tokens are
                no token ids.
        """
        asked = self._asked(text, tokens, namespace, images, image_keys, source_version)
        search = Search(self._parts, asked)
        search.run(every_tier=False)
        return search.result()

    def explain(
        self,
        text: str,
        tokens: Sequence[int] | TokenArray,
        namespace: str = DEFAULT_NAMESPACE,
        images: Sequence[Image] | None = None,
        *,
        image_keys: Sequence[str] | None = None,
        source_version: str = "",
    ) -> Explanation:
        """Why a prompt hits or misses: the nearest stored prompts, and what stopped each.

        As `lookup`, but every tier is asked.
        """
        asked = self._asked(text, tokens, namespace, images, image_keys, source_version)
        search = Search(self._parts, asked)
        search.run(every_tier=True)
        found = search.result()
        return Explanation(found.candidates, found.served, found.reasons)

    # ---- after a request -------------------------------------------------------------------

    def wants(self, lookup: Lookup) -> bool:
        """Whether the KV of a prompt that was looked up should be stored. Counts what was seen."""
        options, asked = self.options, lookup.asked
        if not options.capture or lookup.identical or self._store.read_only:
            return False
        if lookup.tokens is not asked.tokens or lookup.near_image is not None:
            return False  # another prompt was answered
        if not 0 < len(asked.tokens) > options.capture_longer_than:
            return False
        if not is_unicode(asked.text + asked.source_version):
            return False
        if options.capture_after == 1:
            return True
        try:
            seen = self._store.prompts.count_sighting(self._model, asked.namespace, asked.key)
        except SemKVError as error:
            logger.warning("a prompt could not be counted: %s", error)
            return False
        return seen >= options.capture_after

    def observe(
        self,
        text: str,
        tokens: Sequence[int] | TokenArray,
        namespace: str = DEFAULT_NAMESPACE,
        images: Sequence[Image] | None = None,
        *,
        image_keys: Sequence[str] | None = None,
        source_version: str = "",
        vectors: Mapping[VectorKey, Vectors] | None = None,
    ) -> bool:
        """Make a prompt whose KV is stored a donor; False when its KV is not stored.

        Then the namespace's prompts are held within `capture_bytes`.

        Args:
            vectors: those of `Lookup.vectors`; what is missing is encoded.

        Raises:
            StoreError: the store cannot be written.
            OptionError: as of `lookup`, or a text has half of a UTF-16 pair.
            ValueError: an encoder gave a vector that cannot be compared.
        """
        asked = self._asked(text, tokens, namespace, images, image_keys, source_version)
        for given in (text, source_version):
            if not is_unicode(given):
                raise OptionError(f"a prompt to store: {not_unicode(given)}")
        found = dict(vectors or {})
        for key, encoder in self._encoders.items():
            if key not in found and (vector := encode(encoder, asked)) is not None:
                found[key] = vector
        record = PromptRecord(
            id=asked.id,
            model=self._model,
            namespace=namespace,
            key=asked.key,
            text=text,
            images=asked.images_digest,
            source_version=source_version,
            created_at=time.time(),
        )
        stored = self._store.prompts.put(record, found)
        if self.options.capture_bytes is not None:
            self._store.evict(self.options.capture_bytes, namespace, "prompt")
        return stored

    def knows(
        self,
        text: str,
        tokens: Sequence[int] | TokenArray,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        source_version: str = "",
    ) -> bool:
        """Whether a prompt without images is a donor just as `observe` would make it one.

        Raises:
            StoreError: the store cannot be read.
            OptionError: as of `lookup`.
        """
        asked = self._asked(text, tokens, namespace, None, None, source_version)
        prompts = self._store.prompts
        known = prompts.get(self._model, namespace, [asked.id]).get(asked.id)
        return (
            known is not None
            and (known.key, known.source_version) == (asked.key, source_version)
            and all(
                prompts.vectors(self._model, namespace, key, [asked.id])
                for key, encoder in self._encoders.items()
                if encoder.reads == "text"
            )
        )

    def record(self, explored: Explored, *, correct: bool) -> bool:
        """Tell the guard what came of an explored request; False when the donor is gone.

        Args:
            explored: that of the request's `Lookup`.
            correct: whether the answer to the donor's prompt would have done for this one.

        Raises:
            OptionError: `explored` is not what a look-up gave, or `correct` no truth value.
            StoreError: the store cannot be written.
        """
        names = (explored.namespace, explored.donor, explored.layer, explored.encoder)
        if not all(isinstance(name, str) and is_unicode(name) for name in names):
            raise OptionError(f"explored is {explored!a}: use what the request's report has there")
        similarity: object = explored.similarity
        # A cosine in single precision may be a little above 1.
        if not isinstance(similarity, numbers.Real) or not abs(float(similarity)) <= 1.001:
            raise OptionError(f"similarity is {similarity!a}: use a number from -1 to 1")
        if not isinstance(correct, bool):
            raise OptionError(f"correct is {correct!r}: use true or false")
        return self._store.prompts.add_outcome(
            self._model,
            explored.namespace,
            explored.donor,
            VectorKey(explored.layer, explored.encoder),
            similarity=explored.similarity,
            correct=correct,
        )

    # ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop what is under way; the store stays open."""
        self._indexes.close()

    def _asked(
        self,
        text: str,
        tokens: Sequence[int] | TokenArray,
        namespace: str,
        images: Sequence[Image] | None,
        image_keys: Sequence[str] | None,
        source_version: str,
    ) -> Asked:
        if not isinstance(text, str) or not isinstance(source_version, str):
            raise OptionError("a prompt's text and source version are texts")
        try:
            ids = token_array(tokens)
        except (OverflowError, TypeError, ValueError) as error:
            raise OptionError(f"a prompt's tokens are token ids: {error}") from error
        return Asked.of(
            self._model,
            text,
            ids,
            check_namespace(namespace),
            images or (),
            image_keys,
            source_version,
            self.options.normalisation,
        )
