"""What the fork server imports last: it does once what each of its forks would do anew.

vLLM collects garbage seven times while an engine starts and ends. A collection writes to each object it
looks at, and in a fork each page that is written to is copied first. So what was imported is frozen: a
fork looks for garbage only among what it makes itself.
"""

from __future__ import annotations

import gc

from vllm.platforms import current_platform


def _nothing() -> None:
    """In place of what is done already, or must not be undone."""


current_platform.register_triton_kernel_overrides()  # looks at each name of each module
type(current_platform).register_triton_kernel_overrides = staticmethod(_nothing)  # type: ignore[assignment]

gc.collect()
gc.freeze()
gc.unfreeze = _nothing  # which vLLM calls when an engine ends
