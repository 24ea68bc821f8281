"""What the fork server imports last: it does once what each of its forks would do anew.

vLLM collects garbage seven times while an engine starts and ends. A collection writes to each object it
looks at, and in a fork each page that is written to is copied first. So what was imported is frozen: a
fork looks for garbage only among what it makes itself.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d
from vllm.platforms import current_platform
from vllm.v1.sample import sampler


def _nothing() -> None:
    """In place of what is done already, or must not be undone."""


class _Group(ProcessGroupGloo):
    """A process group that shares its device with the others of its process.

    A device has a thread that wakes a hundred times a second, and vLLM makes a dozen groups. In engines
    that wait while others are tested these threads took 3 % of two cores.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [_device(os.getpid())]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@cache
def _device(process: int) -> Any:
    """The device of this process: a fork has no thread of its parent's."""
    return ProcessGroupGloo.create_default_device()


distributed_c10d.ProcessGroupGloo = _Group

current_platform.register_triton_kernel_overrides()  # looks at each name of each module
type(current_platform).register_triton_kernel_overrides = staticmethod(_nothing)  # type: ignore[assignment]

# The rank of a log probability is a count, compiled or not. Compiling it takes each engine three seconds.
compiled = sampler.batched_count_greater_than
sampler.batched_count_greater_than = compiled._torchdynamo_orig_callable

gc.collect()
gc.freeze()
gc.unfreeze = _nothing  # which vLLM calls when an engine ends
