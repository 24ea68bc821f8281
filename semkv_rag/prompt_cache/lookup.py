"""What a look-up over the tiers found, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semkv_rag.prompt_cache.normalise import Normalisation, images_digest, pixels_key, prompt_key
from semkv_rag.prompt_cache.vectors.index import Vectors
from semkv_rag.report import Explored, Status
from semkv_rag.reuse import TokenArray, token_array
from semkv_rag.store import PromptRecord, VectorKey, chunk_id

if TYPE_CHECKING:
    from PIL.Image import Image

EXACT = "exact_text"
SEMANTIC = "semantic_text"
SEMANTIC_LAYER = "semantic"


_NO_TOKENS = token_array([])


def tier_of(layer: str) -> str:
    """The name by which a layer's status is told."""
    return SEMANTIC if layer == SEMANTIC_LAYER else f"embedding:{layer}"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A prompt that is looked up.

    Attributes:
        model, text, tokens, namespace, images, source_version: as given.
        image_keys: of all the prompt's images.
        images_digest: of the images' keys; empty when there are none.
        key: of the normalised text and the images.
        id: of the chunk that its KV is, by its tokens.
    """

    model: str
    text: str
    tokens: TokenArray
    namespace: str
    images: Sequence[Image]
    source_version: str
    image_keys: Sequence[str]
    images_digest: str
    key: str
    id: str

    @classmethod
    def of(
        cls,
        model: str,
        text: str,
        tokens: TokenArray,
        namespace: str,
        images: Sequence[Image],
        image_keys: Sequence[str] | None,
        source_version: str,
        normalisation: Normalisation,
    ) -> Asked:
        """What is asked for, with the keys that follow from the prompt."""
        if image_keys is None:
            image_keys = [pixels_key(image) for image in images]
        digest = images_digest(image_keys)
        key = prompt_key(normalisation(text), digest)
        id_ = chunk_id(model, namespace, _NO_TOKENS, tokens)
        return cls(
            model, text, tokens, namespace, images, source_version, image_keys, digest, key, id_
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored prompt that was looked at.

    Attributes:
        tier: the tier that found it: `exact_text`, `semantic_text`, `embedding:<layer>`.
        donor: the stored prompt.
        similarity: of the prompt to it, -1 to 1; 1 in the exact tier.
        stopped: in words, why it was not taken; None when it was, or could have been.
        key: the layer and encoder that found it; None for the exact tier.
    """

    tier: str
    donor: PromptRecord
    similarity: float
    stopped: str | None = None
    key: VectorKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """What the tiers say of one prompt.

    Attributes:
        asked: the prompt.
        statuses: of each tier, in the order in which they are told.
        served: the candidate whose KV is used, or None.
        tokens: what is to be sent to the model, [tokens] int32: the donor's with `substitute`, else
            the prompt's own.
        identical: whether the donor has the prompt's very tokens.
        near_image: the key of the donor's image, in whose place the prompt's is taken; None when it
            is not.
        explored: the candidate whose outcome is wanted: the guard will learn from it whether it may
            serve, see `Cascade.record`.
        candidates: all that were looked at, the ones that were stopped included.
        reasons: what went wrong, by tier.
        vectors: of the prompt, so that storing it need not encode it again.
        encode_ms: in the encoders.
        lookup_ms: everything, encoders included.
    """

    asked: Asked
    statuses: Mapping[str, Status]
    served: Candidate | None
    tokens: TokenArray
    identical: bool = False
    near_image: str | None = None
    explored: Explored | None = None
    candidates: tuple[Candidate, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    vectors: Mapping[VectorKey, Vectors] = field(default_factory=dict)
    encode_ms: float = 0.0
    lookup_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hits or misses.

    Attributes:
        candidates: of every tier, the nearest first, whether or not an earlier tier serves.
        served: the one that serves, or None.
        reasons: what went wrong, by tier.
    """

    candidates: tuple[Candidate, ...]
    served: Candidate | None
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        """A line for each candidate, for people to read."""
        lines = []
        for candidate in self.candidates:
            verdict = candidate.stopped or "could serve"
            if candidate == self.served:
                verdict = "serves"
            shown = " ".join(candidate.donor.text.split())
            if len(shown) > _SHOWN:
                shown = f"…{shown[-_SHOWN:]}"  # the question stands at the end
            lines.append(f"{candidate.tier} {candidate.similarity:.3f} {shown!r}: {verdict}")
        lines += [f"{tier}: {reason}" for tier, reason in self.reasons.items()]
        return "\n".join(lines) or "no stored prompt resembles it"


_SHOWN = 80
