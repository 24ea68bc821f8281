"""The fusion tier (L1.5): what a model's projector made of an image is stored and loaded again.

vLLM asks an *encoder-cache connector* before it runs the vision tower on an image. It makes one
`ImageFeatureConnector` in the scheduler and one in each worker; each holds the half of its role. See
`lookup.StateLookup` for the scheduler's half, `writer.StateWriter` for the workers', and
`ec_connector/base.py` of vLLM for the contract of both. It stands beside the KV connector: which images
may be loaded and saved is said by the names that its `RequestPlanner` gives them (`identifiers`), and an
image whose KV is reused is never asked for here.

Configured by `ECTransferConfig.ec_connector_extra_config`; `engine.launch` writes it:

* `place`: where the store is, as `StorePlace.to_mapping` gives it, `index_url`: its index;
* `max_bytes`: what the states of one namespace may take.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.connector.images.blended import BlendImage
from semkv_rag.connector.images.lookup import ImageStep, StateLookup
from semkv_rag.connector.images.report import ImageReport, take_image_report
from semkv_rag.connector.images.writer import StateWriter
from semkv_rag.errors import SemKVError
from semkv_rag.store import KVStore, StorePlace

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = [
    "ImageFeatureConnector",
    "ImageReport",
    "lookup_of",
    "save_features",
    "take_image_report",
]

logger = logging.getLogger(__name__)

_lookups: WeakValueDictionary[str, StateLookup] = WeakValueDictionary()
"""Those of this process, by vLLM's name for the engine."""


def lookup_of(engine: str) -> StateLookup | None:
    """The scheduler's half of an engine, in the scheduler's process; None where there is none.

    Args:
        engine: `VllmConfig.instance_id`.
    """
    return _lookups.get(engine)


def save_features(image: BlendImage, features: Tensor) -> None:
    """Have the features stored that a blend computed, in a worker's process.

    Args:
        features: [rows, width].
    """
    if image.save is not None and has_ec_transfer():
        connector = get_ec_transfer()
        if isinstance(connector, ImageFeatureConnector):
            connector.writer.put(image.save, image.model, features)


class ImageFeatureConnector(ECConnectorBase):
    """See the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        place, index_url = StorePlace.from_mapping(extra["place"]), extra["index_url"]
        self._lookup: StateLookup | None = None
        self._writer: StateWriter | None = None
        if role is ECConnectorRole.WORKER:
            device = vllm_config.device_config.device
            self._writer = StateWriter(place, index_url, extra["max_bytes"], torch.device(device))
        else:
            self._lookup = _open_lookup(vllm_config, place, index_url)
            _lookups[vllm_config.instance_id] = self._lookup

    def shutdown(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
        if self._writer is not None:
            self._writer.close()

    # ---- scheduler -------------------------------------------------------------------------

    @property
    def lookup(self) -> StateLookup:
        assert self._lookup is not None, "asked of a worker's connector"
        return self._lookup

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Never waits; it is the one call that shows the request before its images are asked for."""
        self.lookup.see(request)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return self.lookup.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.lookup.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        return self.lookup.step()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.lookup.finished(request)
        return False, None

    # ---- worker ----------------------------------------------------------------------------

    @property
    def writer(self) -> StateWriter:
        assert self._writer is not None, "asked of a scheduler's connector"
        return self._writer

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, ImageStep)
        self.writer.load(self._connector_metadata, encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        assert isinstance(self._connector_metadata, ImageStep)
        self.writer.save(self._connector_metadata, encoder_cache, mm_hash)


def _open_lookup(config: VllmConfig, place: StorePlace, index_url: str | None) -> StateLookup:
    store, fault = None, None
    try:
        store = KVStore(place, index_url=index_url)
    except SemKVError as error:
        fault = str(error)
        logger.warning("semkv: the store %s cannot be used: %s", place, error)
    # Measured by vLLM on the loaded model, before its scheduler is made.
    widths = config.ec_transfer_config.mm_encoder_output_widths
    return StateLookup(store, config_fingerprint(config), widths, fault)
