"""What stands between a similar prompt and its reuse: vetoes first, then a learned threshold.

Pure Python and NumPy: no store, no model, no engine.
"""

from semkv_rag.prompt_cache.guard.policy import Decision, Outcome, decide
from semkv_rag.prompt_cache.guard.vetoes import Veto, veto

__all__ = ["Decision", "Outcome", "Veto", "decide", "veto"]
