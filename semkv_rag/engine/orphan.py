"""An engine's process ends with the one that started it.

vLLM's engine process waits for work from its parent, and goes on waiting when that is killed: it then
holds the model's memory until somebody finds it. Its workers end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """From now on this process ends once its parent has, if `multiprocessing` started it."""
    parent = multiprocessing.parent_process()
    if parent is None:  # the engine runs in the user's own process
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="semkv-parent", daemon=True).start()
