"""The workers' half of the fusion tier: loaded states go in, computed ones are written.

A step does not wait for the disk: a background thread writes the state's file and its row. A crash
loses at most what was still waiting.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank

from semkv_rag.connector.threads import pool_behind_model
from semkv_rag.errors import SemKVError
from semkv_rag.store import KVStore, StorePlace
from semkv_rag.store.upkeep.eviction import STATE

if TYPE_CHECKING:
    from semkv_rag.connector.images.identifiers import StateRef
    from semkv_rag.connector.images.lookup import ImageStep

logger = logging.getLogger(__name__)

WAITING_BYTES = 256 << 20
"""States that wait for the disk; beyond it they are computed again another time."""


class StateWriter:
    """Writes the features of images to the store; one per worker.

    The worker's own thread does everything but the writing itself.

    Args:
        place: where the store is; `index_url` its index, when that is elsewhere.
        max_bytes: what the states of one namespace may take; the longest unused go.
        device: where the model is.
    """

    def __init__(
        self, place: StorePlace, index_url: str | None, max_bytes: int, device: torch.device
    ) -> None:
        self._place = place
        self._index_url = index_url
        self._max_bytes = max_bytes
        self._device = device
        self._store: KVStore | None = None
        self._waiting = 0
        self._lock = Lock()
        self._thread = pool_behind_model(1, "semkv-states")

    def load(self, step: ImageStep, encoder_cache: dict[str, Tensor]) -> None:
        """Put the step's states where vLLM looks for them."""
        for identifier, state in step.loads.items():
            encoder_cache[identifier] = state.to(self._device, non_blocking=True)

    def save(self, step: ImageStep, encoder_cache: dict[str, Tensor], identifier: str) -> None:
        """Have a state that was just computed written, when the step says so."""
        ref = step.saves.get(identifier)
        if ref is not None:
            self.put(ref, step.model, encoder_cache[identifier])

    def put(self, ref: StateRef, model: str, state: Tensor) -> None:
        """Have a state written, by one of the workers.

        Args:
            model: the fingerprint under which it is saved.
        """
        if get_tensor_model_parallel_rank() != 0:
            return
        state = state.detach()
        with self._lock:
            if self._waiting + state.nbytes > WAITING_BYTES:
                logger.info("semkv: an image's features are not stored: too many wait for the disk")
                return
            self._waiting += state.nbytes
        copied: torch.cuda.Event | None = None
        if state.is_cuda:
            on_device, state = state, torch.empty_like(state, device="cpu", pin_memory=True)
            state.copy_(on_device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._thread.submit(self._write, ref, model, state, copied)

    def flush(self) -> None:
        """Wait for what is being written."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what is being written."""
        self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    def _write(
        self, ref: StateRef, model: str, state: Tensor, copied: torch.cuda.Event | None
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            if self._store is None:
                self._store = KVStore(self._place, index_url=self._index_url)
            self._store.states.put(model, ref.namespace, ref.key, state)
            self._store.evict(self._max_bytes, ref.namespace, STATE)
        except (OSError, SemKVError) as error:
            logger.warning("semkv: an image's features could not be stored: %s", error)
        except Exception:
            logger.exception("An image's features could not be stored")
        finally:
            with self._lock:
                self._waiting -= state.nbytes
