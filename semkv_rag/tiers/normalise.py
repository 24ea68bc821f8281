"""When two prompts count as the same text.

Used before every look-up, so it must be cheap. It may be generous: the exact tier never sends other
tokens than the prompt's own, so what the normalisation overlooks is computed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What does not tell two prompts apart.

    Attributes:
        unicode: how characters are composed, their width and their compatible forms (NFKC).
        case: upper and lower case (Unicode case folding).
        white_space: how much there is between words, and any at the ends.
    """

    unicode: bool = True
    case: bool = True
    white_space: bool = True

    def __call__(self, text: str) -> str:
        """`text` in the form that is compared."""
        if self.unicode:
            text = unicodedata.normalize("NFKC", text)
        if self.case:
            text = text.casefold()
            if self.unicode:  # folding may decompose again
                text = unicodedata.normalize("NFKC", text)
        return " ".join(text.split()) if self.white_space else text


def pixels_key(image: Image) -> str:
    """Digest of an image's pixels, 64 hex digits."""
    digest = blake3(f"{image.mode} {image.size[0]}x{image.size[1]}\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def images_digest(keys: Sequence[str]) -> str:
    """Digest of images in their order, 64 hex digits; of one image its key, of none empty.

    Args:
        keys: of the images, 64 hex digits each.
    """
    return keys[0] if len(keys) == 1 else blake3("".join(keys).encode()).hexdigest() if keys else ""


def prompt_key(text: str, images: str = "") -> str:
    """Digest of a prompt, 64 hex digits.

    Args:
        text: normalised.
        images: their digest.
    """
    # A lone surrogate, which cannot be encoded, may come in by JSON.
    return blake3(f"{images}\n{text}".encode(errors="surrogatepass")).hexdigest()
