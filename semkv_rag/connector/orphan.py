"""An engine's processes end with the one that started them.

vLLM's engine process waits for work from its parent, and goes on waiting when that is killed: it then
holds the model's memory until somebody finds it. vLLM's workers end with it, but not while they write to
a disk that does not answer.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import wait

WRITING_S = 10.0
"""What a worker gets for what it is writing."""


def end_with_parent(grace_s: float = 0.0) -> None:
    """Have this process end once its parent has, if `multiprocessing` started it.

    Args:
        grace_s: how long it may take to end by itself before.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # the engine runs in the user's own process
        return

    def watch() -> None:
        wait([parent.sentinel])
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="semkv-parent", daemon=True).start()
