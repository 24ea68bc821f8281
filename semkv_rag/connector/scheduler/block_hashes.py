"""The hashes by which vLLM's prefix cache knows blocks whose KV is not their tokens' own.

vLLM hashes a block over its tokens and all before it: each hash takes in the one before. A salt in one
hash is therefore in all that follow, those of blocks that fill up later included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

Hasher: TypeAlias = Callable[[Any], list[Any]]
"""vLLM's function: the hashes of a request's full blocks that its `block_hashes` lacks."""


@dataclass(frozen=True)
class SaltedHasher:
    """vLLM's hasher of a request's blocks, with salts.

    Attributes:
        hasher: vLLM's.
        salts: by block, in ascending order; each counts from its block on.
    """

    hasher: Hasher
    salts: Mapping[int, bytes]

    def __call__(self, request: Any) -> list[Any]:
        """As vLLM's hasher."""
        hashes: list[Any] = request.block_hashes
        known = len(hashes)
        # The later hashes are made from the salted one, so it has to be there when they are.
        hashes += self.hasher(request)
        for block in sorted(block for block in self.salts if known <= block < len(hashes)):
            salted = sha256(bytes(hashes[block]) + self.salts[block]).digest()
            del hashes[block:]
            hashes.append(salted)
            hashes += self.hasher(request)
        made = hashes[known:]
        del hashes[known:]
        return made


def salt_blocks(request: Any, salts: Mapping[int, bytes]) -> None:
    """Have a request's blocks hashed with salts, those that it has and those that will come.

    Args:
        request: vLLM's `Request`, behind its making.
        salts: by the block from which on they count.
    """
    hasher = request._block_hasher
    if not salts or hasher is None:  # without prefix caching nobody hashes
        return
    del request.block_hashes[min(salts) :]
    request._block_hasher = SaltedHasher(hasher, salts)
    request.update_block_hashes()
