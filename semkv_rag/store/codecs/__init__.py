"""How a chunk's K and V stand in its file: codecs, by name."""

from semkv_rag.store.codecs.codec import Codec, EncodedLayer, Scratch
from semkv_rag.store.codecs.registry import PLAIN, codec_named, codec_names, register_codec

__all__ = [
    "PLAIN",
    "Codec",
    "EncodedLayer",
    "Scratch",
    "codec_named",
    "codec_names",
    "register_codec",
]
