"""When two prompts count as the same text.

Used before every look-up, so it must be cheap. It may be generous: the exact tier never sends other
tokens than the prompt's own, so what the normalisation overlooks is computed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
            text = compatible(text)
        if self.case:
            text = text.casefold()
            if self.unicode:  # folding may decompose again
                text = compatible(text)
        return " ".join(text.split()) if self.white_space else text


# Unicode's Stream-Safe Text Format (UAX #15, section 13). No word of any language comes near it.
_LONGEST_RUN = 30
_JOINER = "\u034f"


def compatible(text: str) -> str:
    """`text` in the normal form NFKC, in time that is linear in its length.

    Normalising sorts each run of combining marks, in time that is quadratic in the run. So a run of
    more than 30 is parted by U+034F COMBINING GRAPHEME JOINER behind each 30.
    """
    if text.isascii():
        return text
    # A longer run has a mark at one of these places, whatever stands between them.
    if not _marks().isdisjoint(text[:: _LONGEST_RUN + 1]):
        text = _maybe_long().sub(lambda run: _full().sub(rf"\g<0>{_JOINER}", run[0]), text)
    return unicodedata.normalize("NFKC", text)


@cache
def _marks() -> frozenset[str]:
    """The characters that start with a combining mark once they are decomposed."""
    # All of them stand in the first two of Unicode's planes, behind Latin-1 and its extensions.
    characters = map(chr, range(0x300, 0x20000))
    return frozenset(c for c in characters if unicodedata.combining(_decomposed(c)[0]))


def _decomposed(character: str) -> str:
    return unicodedata.normalize("NFKD", character)


@cache
def _full() -> re.Pattern[str]:
    """As many marks as may stand in a row, where another one follows."""
    mark = f"[{''.join(sorted(_marks()))}]"
    return re.compile(f"{mark}{{{_LONGEST_RUN}}}(?={mark})")


@cache
def _maybe_long() -> re.Pattern[str]:
    """Where that may be: ten times as fast, as it takes all of the second plane for marks."""
    marks = "".join(mark for mark in sorted(_marks()) if mark < "\U00010000")
    return re.compile(f"[{marks}\U00010000-\U0001ffff]{{{_LONGEST_RUN + 1},}}")


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
