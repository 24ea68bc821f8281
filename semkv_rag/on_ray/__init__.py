"""Precompute on a Ray cluster: the documents are spread over engines that write to one store.

Importing this imports nothing of Ray; it comes with the extra `semkv-rag[ray]`.
"""

from semkv_rag.on_ray.precompute import precompute_on_ray
from semkv_rag.on_ray.resources import EngineResources

__all__ = ["EngineResources", "precompute_on_ray"]
