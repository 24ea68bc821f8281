"""What the fork server imports last: it does once what each of its forks would do anew.

vLLM collects garbage seven times while an engine starts and ends. A collection writes to each object it
looks at, and in a fork each page that is written to is copied first. So what was imported is frozen: a
fork looks for garbage only among what it makes itself.
"""

from __future__ import annotations

import gc

from vllm.platforms import current_platform
from vllm.v1.sample import sampler


def _nothing() -> None:
    """In place of what is done already, or must not be undone."""


current_platform.register_triton_kernel_overrides()  # looks at each name of each module
type(current_platform).register_triton_kernel_overrides = staticmethod(_nothing)  # type: ignore[assignment]

# The rank of a log probability is a count, compiled or not. Compiling it takes each engine three seconds.
compiled = sampler.batched_count_greater_than
sampler.batched_count_greater_than = compiled._torchdynamo_orig_callable

gc.collect()
gc.freeze()
gc.unfreeze = _nothing  # which vLLM calls when an engine ends
