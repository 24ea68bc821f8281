"""Looks a prompt's windows up in the segments of the index; what is found are its candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semkv_rag.reuse.candidates import Candidates, Hits
from semkv_rag.reuse.presence import masks_of
from semkv_rag.reuse.segment import ORDINAL_BITS, Found, Segment
from semkv_rag.reuse.windows import Hashes, Tokens, prompt_hashes, ragged, strides_of

CROWD = 16
"""The most candidates of one window: the oldest ones, where more places in the store hold it."""

_HITS = 4096
"""The most hits of one window in a prompt that repeats it: it has fewer candidates then."""


def candidates_in(segments: Sequence[Segment], prompt: Tokens, window: int) -> Candidates | None:
    """Look up all windows of `prompt`; None when nothing is hit.

    Args:
        segments: oldest first.
        prompt: [tokens], at least `window`.
        window: tokens of an indexed window.
    """
    hashes = prompt_hashes(prompt, window)
    masks = masks_of(hashes, ORDINAL_BITS)
    maybe = np.zeros(len(hashes), dtype=np.bool_)
    for segment in segments:
        maybe |= segment.may_hold(hashes, masks)
    places = maybe.nonzero()[0]
    if not len(places):
        return None
    places = places[np.argsort(hashes[places], kind="stable")]
    ordered = hashes[places]
    firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    repeats = np.diff(firsts, append=len(ordered))
    found = _look_up(segments, ordered[firsts])
    if not len(found.keys):
        return None
    # A window that repeats in the prompt has its hits at each of its places.
    rank = np.arange(len(found.keys)) - np.searchsorted(found.keys, found.keys)
    kept = rank < np.maximum(_HITS // repeats[found.keys], 1)
    found.more[found.keys[~kept]] = True
    found = found.only(kept)
    copies = repeats[found.keys]
    hits = Hits(
        np.repeat(found.numbers, copies),
        np.repeat(found.lengths, copies),
        np.repeat(found.ordinals * strides_of(found.lengths, window), copies),
        places[ragged(firsts[found.keys], copies)],
    )
    crowded = np.zeros(len(hashes), dtype=np.bool_)
    crowded[places] = np.repeat(found.more, repeats)
    return Candidates(hits, crowded, window)


def _look_up(segments: Sequence[Segment], hashes: Hashes) -> Found:
    """The oldest windows of each hash in all segments, `CROWD` at most."""
    parts = [segment.oldest(hashes, CROWD) for segment in segments]
    keys = np.concatenate([part.keys for part in parts])
    by_key = np.argsort(keys, kind="stable")  # the segments' order is by age
    keys = keys[by_key]
    rank = np.arange(len(keys)) - np.searchsorted(keys, keys)
    kept = by_key[rank < CROWD]
    more = np.logical_or.reduce([part.more for part in parts])
    more[keys[rank >= CROWD]] = True
    return Found(
        keys[rank < CROWD],
        np.concatenate([part.numbers for part in parts])[kept],
        np.concatenate([part.lengths for part in parts])[kept],
        np.concatenate([part.ordinals for part in parts])[kept],
        more,
    )
