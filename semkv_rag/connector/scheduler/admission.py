"""What a request asks for, and whether it is served with reuse.

Images need rules of their own:

* An image's placeholders are matched by what it shows (see `reuse.images`).
* Its stored KV is used where everything before it is the same, too. Elsewhere a blend computes its rows.
* Its features come from the store under a name that is given here (`images.identifiers`).
* An image may be taken for a stored one that looks like it. It then has the stored one's placeholders and
  features, and the plan ends before it. The blocks from there on are this request's alone.
* A plan also ends before videos and audio.
* In models with M-RoPE an image's tokens stand on a grid, and the text behind it has other positions than
  its numbers in the prompt. The image's KV is used where everything before it, and so its position, is
  the same. It is not used where the image is taken for another one, whose grid may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from semkv_rag.connector.images.connector import lookup_of
from semkv_rag.connector.images.identifiers import state_identifier
from semkv_rag.connector.images.lookup import StateLookup
from semkv_rag.connector.images.places import rows_of
from semkv_rag.connector.obstacle import unblended_images
from semkv_rag.connector.scheduler.tracked import TrackedRequest
from semkv_rag.reuse import image_key
from semkv_rag.wire import OURS_ALONE, PARAMS_KEY

if TYPE_CHECKING:
    from vllm.v1.request import Request


def wishes_in(request: Request, *, any_namespace: bool) -> tuple[dict[str, Any], str | None]:
    """Our part of a request's `kv_transfer_params`, and why it is served plainly, or None.

    Whatever stands there: a request is checked before it comes here, but nothing that comes here may
    stop the engine.

    Args:
        any_namespace: whether a request may name its own.
    """
    transfer = request.kv_transfer_params
    given = transfer.get(PARAMS_KEY) if isinstance(transfer, dict) else None
    if not any_namespace:
        known = given if isinstance(given, dict) else {}
        return {name: known[name] for name in known if name not in OURS_ALONE}, None
    if not isinstance(given, dict) or "namespace" not in given:
        return {}, "the request has no namespace"
    return dict(given), None


@dataclass(frozen=True)
class ImageRules:
    """What is done with the images of a model's prompts.

    Attributes:
        obstacle: in words, why no KV is reused in prompts with images, or None.
        grids: whether an image's tokens stand on a grid (M-RoPE).
        stored: whether the features of images are stored.
        unblended: in words, why no blend computes rows of images, or None.
        engine: vLLM's name for it.
    """

    obstacle: str | None = None
    grids: bool = False
    stored: bool = False
    unblended: str | None = None
    engine: str = ""

    @classmethod
    def of(cls, config: VllmConfig) -> ImageRules:
        """Those of a configuration."""
        both_ways = config.model_config.is_mm_prefix_lm
        return cls(
            "this model attends to an image's rows both ways" if both_ways else None,
            grids=config.model_config.uses_mrope,
            stored=config.ec_transfer_config is not None,
            unblended=unblended_images(config),
            engine=config.instance_id,
        )

    @property
    def why_not_behind(self) -> str:
        """Why chunks behind an image are not reused, in words."""
        why = f": {self.unblended}" if self.unblended else ""
        return f"its stored chunks stand behind an image, whose KV is not stored{why}"

    @property
    def lookup(self) -> StateLookup | None:
        """The lookup of images' features; None where they are not stored."""
        return lookup_of(self.engine) if self.stored else None


def obstacle(tracked: TrackedRequest, images: ImageRules) -> str | None:
    """Why this request is served plainly, in words, or None."""
    request = tracked.request
    if tracked.captures_alone:
        return "the request captures a chunk"
    if not tracked.options.enabled:
        return "reuse was switched off for this request"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "the prompt is not made of tokens"
    if request.mm_features and images.obstacle is not None:
        return f"the prompt holds images, and {images.obstacle}"
    if request.skip_reading_prefix_cache:
        return "the request asked for all prompt tokens to be computed"
    return None


def note_images(
    tracked: TrackedRequest, rules: ImageRules, near: Mapping[str, str], *, store: bool
) -> list[str]:
    """Note a request's images; the names by which their features may be loaded and saved.

    Args:
        near: the keys of images that are taken for another one, and of that one.
        store: whether features that are computed are stored.

    Returns:
        One for each image and the like, in the prompt's order; none where no features are stored.
    """
    names = []
    for feature in tracked.request.mm_features:
        # Not its identifier: that is the namespace's own, and a copy's (for another answer to the
        # same request) is one of ours already.
        key = image_key(feature.mm_hash or feature.identifier)
        donor = near.get(key) if rules.stored else None
        if donor is not None and tracked.first_near is None:
            tracked.first_near = feature.mm_position.offset
        # Without its data vLLM has its features from elsewhere, and nobody knows its grid.
        known = feature.data is not None and rules.unblended is None and donor is None
        tracked.images.append(
            rows_of(
                donor or key,
                feature.mm_position,
                blended=known and feature.modality == "image",
                on_grid=rules.grids,
                from_store=known or not rules.grids,
            )
        )
        if rules.stored:
            names.append(state_identifier(tracked.options.namespace, key, donor, save=store))
    return names
