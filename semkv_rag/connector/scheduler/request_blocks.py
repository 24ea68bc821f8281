"""The blocks of requests. Blends and captures need some that vLLM gives up behind a sliding window.

With its hybrid KV cache manager, vLLM gives the layers with a window blocks for the tokens that they
still attend to, and its null block for all tokens before. A blend needs more: it puts the KV of all its
tokens into the cache, in every layer, because a computed token in the middle of the prompt attends to the
tokens before it. So a blend takes blocks out of vLLM's pool in place of the null ones, and gives them
back when it ends. Then the request has the blocks that a computed prompt has.

A chunk that is captured is read when its last token is computed. The blocks of its first tokens are kept
until then.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, SlidingWindowSpec

from semkv_rag.connector.messages import NULL_BLOCK, BlendTask, Blocks
from semkv_rag.connector.scheduler.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

NO_ROOM = "the paged cache has no room for a blend, which needs blocks for all tokens in all layers"
SEEN_BEHIND = 256
"""So many tokens behind a blend are computed to see that the model gives numbers with it."""
PATIENCE_S = 10.0
"""A request waits this long for room for its blend; then it is computed."""


@dataclass
class _Lent:
    """What a blend has beside its request's own blocks, by group and number.

    Attributes:
        end: where the blend ends.
        found: those before the blend, out of the prefix cache.
        new: those that it fills.
    """

    request: Request
    end: int
    found: dict[tuple[int, int], KVCacheBlock]
    new: dict[tuple[int, int], KVCacheBlock]


@dataclass
class _Kept:
    """Blocks of a request that is captured, by group and number.

    Attributes:
        preemptions: of the request, when they were taken.
        read: whether the capture's step has been made.
    """

    request: Request
    preemptions: int
    blocks: dict[tuple[int, int], KVCacheBlock] = field(default_factory=dict)
    read: bool = False

    @property
    def is_over(self) -> bool:
        """Once vLLM has taken the request back, others need the blocks to go on."""
        return self.read or self.request.num_preemptions != self.preemptions


class RequestBlocks:
    """Knows which blocks each request has; one per engine, in the scheduler's thread.

    Args:
        config: the one of vLLM's cache.
        block_size: tokens of a block, the same in all groups.

    Attributes:
        manager: vLLM's, there before any request is.
        windowed: whether vLLM gives up blocks of requests that run.
    """

    def __init__(self, config: KVCacheConfig, block_size: int) -> None:
        self._windows = [_window(group.kv_cache_spec) for group in config.kv_cache_groups]
        self._blocks, self._block_size = config.num_blocks, block_size
        self._waits_since: dict[str, float] = {}
        self._lent: dict[str, _Lent] = {}
        self._kept: dict[str, _Kept] = {}
        self.windowed = any(self._windows)
        self.manager: KVCacheManager | None = None

    def of(self, request_id: str) -> Blocks:
        """A request's blocks, as vLLM has them."""
        assert self.manager is not None
        blocks: Blocks = self.manager.get_block_ids(request_id)
        return blocks

    # ---- blends ----------------------------------------------------------------------------

    def may_blend(self, request: Request) -> bool | None:
        """Whether there is room for a request's blend; None where there may be later: vLLM asks again."""
        if not self.windowed:
            return True
        needed = self._needed(request)
        since = self._waits_since.setdefault(request.request_id, time.monotonic())
        waits = needed < self._blocks and time.monotonic() - since < PATIENCE_S
        fits = needed <= self._pool.get_num_free_blocks()
        if fits or not waits:
            del self._waits_since[request.request_id]
        return True if fits else None if waits else False

    def lend(self, request: Request, task: BlendTask) -> BlendTask:
        """A request's blend, with blocks in the places of null ones that it looks at.

        Args:
            task: the blend, with the blocks that vLLM gave the request.
        """
        if self.windowed:
            blocks = self._lend(request, task.block_ids, task.start, task.plan.covered)
            task = (
                replace(task, no_room=NO_ROOM)
                if blocks is None
                else replace(task, block_ids=blocks)
            )
        if self.windowed or len(self._windows) > 1:
            end = len(task.tokens)
            task = replace(task, behind=request.prompt_token_ids[end : end + SEEN_BEHIND])
        return task

    def _lend(self, request: Request, blocks: Blocks, start: int, end: int) -> Blocks | None:
        """A request's blocks, with others in the places of null ones; None where there are none.

        Args:
            start: where its blend begins. What stands before it vLLM has found in its prefix cache.
            end: where it ends.
        """
        first, last = start // self._block_size, -(-end // self._block_size)
        found: dict[tuple[int, int], KVCacheBlock] = {}
        for group, window in enumerate(self._windows):
            seen = max(0, start - window + 1) // self._block_size if window else first
            for at in range(seen, first):
                if blocks[group][at] != NULL_BLOCK:
                    continue
                if (block := self._cached(request, group, at)) is None:
                    return None
                found[group, at] = block
        free = [
            (group, at)
            for group, at in itertools.product(range(len(blocks)), range(first, last))
            if blocks[group][at] == NULL_BLOCK
        ]
        partly_cached = start % self._block_size and any(at == first for _, at in free)
        self._pool.touch(list(found.values()))
        if partly_cached or len(free) > self._pool.get_num_free_blocks():
            self._pool.free_blocks(found.values())
            return None
        taken = self._pool.get_new_blocks(len(free))
        new = dict(zip(free, taken, strict=True))
        self._lent[request.request_id] = _Lent(request, end, found, new)
        return _filled(blocks, {**found, **new})

    def give_back(self, request_ids: Iterable[str], blended: Collection[str]) -> None:
        """Called for requests whose blends ended, in whatever way: nothing of ours writes there now.

        Args:
            blended: those of them whose blocks are filled. As vLLM's own, they can be found in its prefix
                cache until others need them.
        """
        for request_id in request_ids:
            if (lent := self._lent.pop(request_id, None)) is None:
                continue
            if request_id in blended and self._pool.enable_caching:
                self._have_found(lent)
            # Those that come first in the prompt serve most requests, and go last.
            self._pool.free_blocks([*reversed(lent.new.values()), *lent.found.values()])

    def _have_found(self, lent: _Lent) -> None:
        full = lent.end // self._block_size
        for group in range(len(self._windows)):
            blocks = [self._pool.null_block] * full
            for (of_group, at), block in lent.new.items():
                if of_group == group and at < full:
                    blocks[at] = block
            self._pool.cache_full_blocks(lent.request, blocks, 0, full, self._block_size, group)

    def _cached(self, request: Request, group: int, at: int) -> KVCacheBlock | None:
        """A block of a request in vLLM's prefix cache."""
        fits = self._pool.hash_block_size == self._block_size and at < len(request.block_hashes)
        if not fits:
            return None
        cached = self._pool.get_cached_block(request.block_hashes[at], [group])
        return cached[0] if cached else None

    # ---- captures --------------------------------------------------------------------------

    def keep_for_captures(self, scheduled: Iterable[TrackedRequest]) -> None:
        """Keep the blocks of chunks whose capture is to come. Called for each step that is made.

        What was read in the step before is given back: this one's forward runs behind the copy.
        """
        for request_id in [name for name, kept in self._kept.items() if kept.is_over]:
            self._let_go(request_id)
        for tracked in scheduled if self.windowed else ():
            if tracked.capture is not None and not tracked.captured:
                self._keep(tracked.request, int(tracked.capture["context"]))

    def with_kept(self, request_id: str) -> Blocks:
        """A request's blocks when its capture's step is made, with those that were kept."""
        blocks = self.of(request_id)
        if (kept := self._kept.get(request_id)) is None:
            return blocks
        kept.read = True
        return _filled(blocks, kept.blocks)

    def ended(self, request_id: str) -> None:
        """Called for each request that ends. What its blend has is given back when that has ended."""
        self._waits_since.pop(request_id, None)
        self._let_go(request_id)

    def _let_go(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None:
            self._pool.free_blocks(kept.blocks.values())

    def _keep(self, request: Request, context: int) -> None:
        if self._needed(request) >= self._blocks:
            return  # it would wait forever for blocks that it keeps itself
        kept = self._kept.setdefault(request.request_id, _Kept(request, request.num_preemptions))
        assert self.manager is not None
        groups = self.manager.get_blocks(request.request_id).blocks
        for group, window in enumerate(self._windows):
            for at in range(context // self._block_size, len(groups[group]) if window else 0):
                if (group, at) in kept.blocks:
                    continue
                block = groups[group][at]
                if not block.is_null or (block := self._cached(request, group, at)) is not None:
                    self._pool.touch([block])
                    kept.blocks[group, at] = block

    def _needed(self, request: Request) -> int:
        """How many blocks a request takes that has all of them in all groups."""
        return len(self._windows) * -(-int(request.num_tokens) // self._block_size)

    @property
    def _pool(self) -> BlockPool:
        assert self.manager is not None
        return self.manager.block_pool


def _filled(blocks: Blocks, more: Mapping[tuple[int, int], KVCacheBlock]) -> Blocks:
    """Blocks, with others in some places."""
    filled = tuple(list(group) for group in blocks)
    for (group, at), block in more.items():
        filled[group][at] = block.block_id
    return filled


def _window(spec: KVCacheSpec) -> int | None:
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
