"""Images in a prompt's tokens: which are told apart, and how far a prompt with them is blended.

In a prompt's tokens an image is the same placeholder again and again, whatever it shows. For matching,
each placeholder that stands for an embedding is replaced by a negative number drawn from the image's
key: equal numbers then mean the same row of the same image, and an image's KV is found like any
other's. These numbers are never sent to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from semkv_rag.reuse.plan import ReusePlan, Span
from semkv_rag.reuse.tokens import TokenArray


def image_key(identifier: str) -> str:
    """The key of an image, 64 hex digits.

    Args:
        identifier: what tells its content; any text, a client's too.
    """
    return blake3(identifier.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """An image, or another item that is no text, in a prompt.

    Attributes:
        key: from `image_key`.
        positions: of the tokens that stand for its embeddings, [rows], ascending.
        blended: whether a blend may compute them.
        on_grid: whether they stand on a grid, and text behind them at other positions than its number
            (M-RoPE).
        from_store: whether its KV may come from the store.
    """

    key: str
    positions: NDArray[np.int64]
    blended: bool = False
    on_grid: bool = False
    from_store: bool = True

    def first_to_compute(self, spans: Sequence[Span]) -> int | None:
        """The first of its rows whose KV does not come out of an exact span, or None."""
        if not self.from_store:
            return int(self.positions[0])
        covered = np.zeros(len(self.positions), dtype=bool)
        for span in spans:
            if span.exact:
                covered |= (self.positions >= span.dst) & (self.positions < span.end)
        return None if covered.all() else int(self.positions[np.argmin(covered)])


def tell_images_apart(tokens: TokenArray, images: Sequence[ImageRows]) -> TokenArray:
    """`tokens` with each image's placeholders replaced by numbers below 0 of its own, [tokens]."""
    if not images:
        return tokens
    told = tokens.copy()
    for image in images:
        rows = len(image.positions)
        numbers = np.frombuffer(blake3(image.key.encode()).digest(length=4 * rows), "<u4")
        told[image.positions] = -1 - (numbers & 0x7FFFFFFF).astype(np.int64)
    return told


def first_to_compute(spans: Sequence[Span], images: Sequence[ImageRows]) -> int | None:
    """The first row that no exact span covers, of images that no blend computes; or None.

    A blend ends here, and vLLM goes on with the images' features.

    Args:
        spans: in prompt order.
        images: in prompt order.
    """
    firsts = (image.first_to_compute(spans) for image in images if not image.blended)
    return next((first for first in firsts if first is not None), None)


def images_in_blend(plan: ReusePlan, images: Sequence[ImageRows]) -> dict[int, bool]:
    """The images that a plan's blend has to know, by their numbers in `images`.

    Returns:
        Whether it computes rows of them. Others stand on a grid, and say where tokens behind them are.
    """
    computed: dict[int, bool] = {}
    for number, image in enumerate(images):
        first = image.first_to_compute(plan.spans)
        if first is not None and first < plan.covered:
            computed[number] = True
        elif image.on_grid and image.positions[0] < plan.covered:
            computed[number] = False
    return computed
