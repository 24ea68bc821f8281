"""What a request asks for, and whether it is served with reuse.

An image's placeholders are matched by what it shows (see `reuse.images`). Its KV is used where all before
it is the same as well; a plan ends before the first image of which that is not true. The features of
images come from the store under names that are given here (`images.identifiers`). Where an image is taken
for a stored one that looks like it, all of this follows the stored one, and the blocks from there on are
that request's alone. In models with M-RoPE an image's tokens stand on a grid,
and what is behind it at other positions than its number in the prompt, which is what a store has. So
their prompts with images are not stored, and a plan ends before the first image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semkv_rag.connector.images.identifiers import state_identifier
from semkv_rag.connector.images.places import rows_of
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


def obstacle(tracked: TrackedRequest, image_obstacle: str | None) -> str | None:
    """Why this request is served plainly, in words, or None.

    Args:
        image_obstacle: in words, why KV is not reused in prompts with images, or None.
    """
    request = tracked.request
    if tracked.captures_alone:
        return "the request captures a chunk"
    if not tracked.options.enabled:
        return "reuse was switched off for this request"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "the prompt is not made of tokens"
    if request.mm_features and image_obstacle is not None:
        return f"the prompt holds images, and {image_obstacle}"
    if request.skip_reading_prefix_cache:
        return "the request asked for all prompt tokens to be computed"
    return None


def note_images(
    tracked: TrackedRequest, near: Mapping[str, str], *, features: bool, store: bool
) -> list[str]:
    """Note a request's images; the names by which their features may be loaded and saved.

    Args:
        near: the keys of images that are taken for another one, and of that one.
        features: whether features are stored at all.
        store: whether those that are computed are.

    Returns:
        One for each image and the like, in the prompt's order; none where no features are stored.
    """
    names = []
    for feature in tracked.request.mm_features:
        # Not its identifier: that is the namespace's own, and a copy's (for another answer to the
        # same request) is one of ours already.
        key = image_key(feature.mm_hash or feature.identifier)
        donor = near.get(key) if features else None
        if donor is not None and tracked.first_near is None:
            tracked.first_near = feature.mm_position.offset
        tracked.images.append(rows_of(donor or key, feature.mm_position))
        if features:
            names.append(state_identifier(tracked.options.namespace, key, donor, save=store))
    return names
