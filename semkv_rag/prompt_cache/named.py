"""Encoders by name, for the command line and for options that are plain values.

`minilm` is the sentence encoder that comes with the extra `prompt-cache`, `phash` the perceptual hash of
an image; any other name is a folder or a hub name of sentence-transformers, with `:image` behind it for a
CLIP model that is given images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache.lookup import SEMANTIC_LAYER
from semkv_rag.prompt_cache.options import PromptCacheOptions
from semkv_rag.prompt_cache.vectors.encoders import Encoder, PerceptualHash, SentenceEncoder

MINILM, PHASH, IMAGE_SUFFIX = "minilm", "phash", ":image"


def encoder_named(name: str) -> Encoder:
    """The encoder of a name; its model is loaded when it is first used.

    Raises:
        OptionError: there is none.
    """
    if name == MINILM:
        return SentenceEncoder()
    if name == PHASH:
        return PerceptualHash()
    model = name.removesuffix(IMAGE_SUFFIX)
    if not model.strip():
        raise OptionError(
            f"there is no encoder {name!r}: use {MINILM}, {PHASH}, or a folder or hub name of"
            f" sentence-transformers, with {IMAGE_SUFFIX} behind it for images"
        )
    return SentenceEncoder(model, reads="text" if model == name else "image")


def encoders_of(layers: Mapping[str, str | Encoder] | None) -> dict[str, Encoder] | None:
    """The encoders of layers that are given by name, or as they are; None where none are given.

    Raises:
        OptionError: a layer or an encoder cannot be had.
    """
    if not layers:
        return None
    encoders = {}
    for layer, given in layers.items():
        if not layer.isidentifier():
            raise OptionError(f"a layer {layer!r} cannot be: use letters, digits and _")
        encoder = encoder_named(given) if isinstance(given, str) else given
        if not callable(getattr(encoder, "encode", None)):
            raise OptionError(f"layer {layer!r}: {given!r} is no encoder")
        if layer == SEMANTIC_LAYER and encoder.reads != "text":
            raise OptionError(f"layer {layer!r} reads text: give {given!r} a layer of another name")
        encoders[layer] = encoder
    return encoders


def prompt_cache_of(
    options: PromptCacheOptions | Mapping[str, Any] | None,
    layers: Mapping[str, str | Encoder] | None,
) -> tuple[PromptCacheOptions | None, dict[str, Encoder] | None]:
    """What an engine takes as `prompt_cache` and `encoders`, out of what a user gives.

    Args:
        options: those of the prompt cache, or a mapping of their fields; None for none.
        layers: encoders, by layer; of the semantic layer alone the MiniLM when left out.

    Raises:
        OptionError: one of them cannot be used, or they do not fit each other.
    """
    encoders = encoders_of(layers)
    if options is None:
        if encoders is not None:
            raise OptionError(
                "encoders are for the prompt cache: give prompt_cache too, {} for the defaults"
            )
        return None, None
    chosen = (
        options
        if isinstance(options, PromptCacheOptions)
        else PromptCacheOptions.from_mapping(options)
    )
    chosen.check_layers(encoders or {SEMANTIC_LAYER})
    return chosen, encoders


def plain_options(given: Any) -> Any:
    """Options of the prompt cache as a mapping of all of their fields; whatever else is given, as it is.

    All of them, so that none given are not mistaken for no prompt cache.

    Raises:
        OptionError: a field is unknown or cannot be what it is.
    """
    options = PromptCacheOptions.from_mapping(given) if isinstance(given, Mapping) else given
    return options.to_mapping() if isinstance(options, PromptCacheOptions) else given


def encoder_names(layers: Mapping[str, str | Encoder]) -> dict[str, str]:
    """The names of encoders, by layer."""
    return {
        layer: encoder if isinstance(encoder, str) else encoder.name
        for layer, encoder in layers.items()
    }
