"""The user's process: `Engine` and everything around vLLM's engine client.

How a token goes through vLLM from here:
`connector` (where vLLM calls us) → `planner` (scheduler: which chunks, which blocks) → `executor`
(worker: files, capture) → `blend_pass` (load, move, select, recompute) → the paged cache.
"""

from semkv_rag.errors import MissingExtraError

try:
    import vllm  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("vllm", "cpu", "gpu") from error

from vllm.lora.request import LoRARequest

from semkv_rag.connector.messages import GateReport
from semkv_rag.engine.completion import Completion
from semkv_rag.engine.engine import Engine
from semkv_rag.engine.feature_encoder import ImageFeatureEncoder
from semkv_rag.engine.launch import model_fingerprint

__all__ = [
    "Completion",
    "Engine",
    "GateReport",
    "ImageFeatureEncoder",
    "LoRARequest",
    "model_fingerprint",
]
