"""Images on their way into vLLM: kept as they are, and named in a prompt's tokens.

vLLM's renderer turns a request's images into tensors and says of each only its hash and where it
stands. Encoders of the tiers want the images themselves, so they travel beside the rendered prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from PIL import Image
from vllm.multimodal.media.base import MediaWithBytes
from vllm.renderers.base import BaseRenderer

from semkv_rag.connector.images.places import rows_of
from semkv_rag.engine.caller import CALLER, image_name
from semkv_rag.reuse import ImageRows, image_key

IMAGES_FIELD = "semkv_images"
"""The field of a rendered prompt with its images, when nothing but text and images is in it."""


def keep_images(renderer: BaseRenderer[Any]) -> None:
    """Have a renderer put the images of each prompt beside what it makes of them.

    And have it keep apart what two tenants call by one name: vLLM takes a client's `uuid` for what an
    image shows, and would give one tenant another's image.

    vLLM has no hook there: the images are gone once `_process_multimodal` returns.
    """
    process = renderer._process_multimodal_async

    async def keeping(prompt: Any, mm_data: Any, **options: Any) -> Any:
        if (caller := CALLER.get()) is not None and options.get("mm_uuids"):
            options["mm_uuids"] = _own_names(options["mm_uuids"], caller.namespace)
        rendered = await process(prompt, mm_data, **options)
        rendered[IMAGES_FIELD] = _pictures(mm_data)
        return rendered

    renderer._process_multimodal_async = keeping


def images_of(rendered: Mapping[str, Any]) -> list[ImageRows]:
    """The images of a rendered prompt, in its order; anything else that is no text counts as one."""
    if rendered["type"] != "multimodal":
        return []
    hashes, places = rendered["mm_hashes"], rendered["mm_placeholders"]
    found = [
        (place.offset, rows_of(image_key(identifier), place))
        for kind in hashes
        for identifier, place in zip(hashes[kind], places[kind], strict=True)
    ]
    return [image for _, image in sorted(found, key=itemgetter(0))]


def _own_names(uuids: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """The names that a client gave its images and the like, by modality, as its namespace's own."""

    def own(given: Any) -> Any:
        if isinstance(given, str):
            return image_name(namespace, given)
        return given if given is None else [own(one) for one in given]

    return {modality: own(given) for modality, given in uuids.items()}


def _pictures(mm_data: Mapping[str, Any]) -> list[Image.Image]:
    """The images of a request; none when it holds anything that is no image."""
    given = mm_data.get("image")
    items: Iterable[Any] = given if isinstance(given, list | tuple) else [given]
    pictures = [item.media if isinstance(item, MediaWithBytes) else item for item in items]
    if set(mm_data) != {"image"} or not all(isinstance(one, Image.Image) for one in pictures):
        return []
    return pictures
