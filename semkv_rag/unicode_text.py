"""Texts that users bring: whether they can be encoded at all."""

from __future__ import annotations

import re

# Half of a UTF-16 pair. JSON may bring one in; tokenizers and databases refuse it.
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, and so can be encoded."""
    return text.isascii() or _SURROGATE.search(text) is None


def not_unicode(text: str) -> str:
    """What is wrong with a text that is not, in words."""
    found = _SURROGATE.search(text)
    assert found is not None
    return f"U+{ord(found[0]):04X} at character {found.start()} is half of a UTF-16 pair"
