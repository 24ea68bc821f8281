"""Codecs by name."""

from __future__ import annotations

from typing import Final

from semkv_rag.errors import OptionError
from semkv_rag.store.codecs.codec import Codec
from semkv_rag.store.codecs.pairs import CODECS

PLAIN: Final = "plain"

_codecs: Final[dict[str, Codec]] = {codec.name: codec for codec in CODECS}


def register_codec(codec: Codec) -> None:
    """Add a codec, in this process.

    Raises:
        OptionError: its name is another's.
    """
    if _codecs.setdefault(codec.name, codec) is not codec:
        raise OptionError(f"codec {codec.name}: another one has this name")


def codec_named(name: str) -> Codec:
    """The codec of that name.

    Raises:
        OptionError: there is none; names those that there are.
    """
    if not isinstance(name, str) or name not in _codecs:
        raise OptionError(f"codec is {name!r}: use one of {', '.join(_codecs)}")
    return _codecs[name]


def codec_names() -> tuple[str, ...]:
    """The names of all codecs."""
    return tuple(_codecs)
