"""The KV connector: where vLLM's scheduler and workers call this package.

vLLM makes one `SemKVConnector` in the scheduler and one in each worker; each holds the half of its
role and hands every call on to it. See `planner.RequestPlanner` for the scheduler's half and
`executor.BlendExecutor` for the workers'; `kv_connector/v1/base.py` of vLLM is the contract of both.

A step, in order:

1. scheduler: `on_new_request` for each new request, `get_num_new_matched_tokens` and
   `update_state_after_alloc` for each that is let in, `build_connector_meta` once;
2. worker: `bind_connector_metadata`, the forward if there is one, then `start_load_kv` (blends go on),
   `wait_for_save` (captures), `get_transfer_results` (blends that ended),
   `get_block_ids_with_load_errors`, `build_connector_worker_meta`. Stages of a
   pipeline blend behind all of this, see `BlendExecutor.blend_behind_step`;
3. scheduler: `request_finished_all_groups` for requests that end, `update_connector_output`.

A blend is an asynchronous load to vLLM: its request has its blocks, and no place in a step until
`get_transfer_results` names it. See `worker.blend.blend_queue` for what happens meanwhile.

Configured by `KVTransferConfig.kv_connector_extra_config`; `engine.launch` writes it:

* `place`: where the store is, as `StorePlace.to_mapping` gives it, `index_url`: its index;
* `reuse`: the default options of requests, as `ReuseOptions.to_mapping` gives them;
* `request_namespace`: whether a request may name its own namespace (default: it may not);
* `ram_bytes`: what chunks may take in the workers' memory, of all ranks together (default: 0, none);
* `codec`: by which captured chunks are stored (default: plain);
* `capture_results`: where workers of the same machine tell what became of captures (default: nowhere);
* `selectors`: users' own, as `semkv_rag.selectors.load_selectors` takes them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.capture_results import ADDRESS_KEY, CaptureTeller
from semkv_rag.connector.fingerprint import config_fingerprint
from semkv_rag.connector.messages import (
    StepMetadata,
    WorkerHandshake,
    WorkerResults,
    of_all_ranks,
)
from semkv_rag.connector.metrics import ReuseMetrics, ReuseStats
from semkv_rag.connector.orphan import WRITING_S, end_with_parent
from semkv_rag.connector.scheduler.admission import ImageRules
from semkv_rag.connector.scheduler.catalogue import Catalogue
from semkv_rag.connector.scheduler.owners import Owners
from semkv_rag.connector.scheduler.planner import RequestPlanner
from semkv_rag.connector.scheduler.precedence import Precedence
from semkv_rag.connector.scheduler.request_blocks import RequestBlocks
from semkv_rag.connector.scheduler.step_work import scheduled_ranges
from semkv_rag.connector.worker.executor import BlendExecutor
from semkv_rag.errors import SemKVError
from semkv_rag.selectors import load_selectors
from semkv_rag.store import KVStore, StorePlace
from semkv_rag.store.codecs import PLAIN

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SemKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        place = StorePlace.from_mapping(extra["place"])
        load_selectors(extra.get("selectors", {}))
        self._planner: RequestPlanner | None = None
        self._precedence = Precedence()
        self._store: KVStore | None = None
        self.executor: BlendExecutor | None = None
        if role is KVConnectorRole.WORKER:
            end_with_parent(WRITING_S)
            ram_bytes, codec = int(extra.get("ram_bytes", 0)), extra.get("codec", PLAIN)
            teller = CaptureTeller(extra.get(ADDRESS_KEY))
            self.executor = BlendExecutor(vllm_config, place, ram_bytes, codec, teller)
        else:
            end_with_parent()
            blocks = RequestBlocks(kv_cache_config, vllm_config.cache_config.block_size)
            self._planner = self._make_planner(vllm_config, place, extra, blocks)

    def _make_planner(
        self,
        config: VllmConfig,
        place: StorePlace,
        extra: dict[str, Any],
        blocks: RequestBlocks,
    ) -> RequestPlanner:
        model = config_fingerprint(config)
        catalogue, fault = None, None
        try:
            self._store = KVStore(place, index_url=extra.get("index_url"))
            catalogue = Catalogue(self._store)
            catalogue.load(model)
        except SemKVError as error:
            fault = str(error)
            logger.warning("semkv: the store %s cannot be used: %s", place, error)
        return RequestPlanner(
            catalogue,
            owners=Owners(model, config.lora_config),
            blocks=blocks,
            defaults=ReuseOptions.from_mapping(extra.get("reuse", {})),
            block_size=config.cache_config.block_size,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            steps_at_once=config.max_concurrent_batches,
            request_namespace=bool(extra.get("request_namespace", False)),
            images=ImageRules.of(config),
            store_fault=fault,
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Nothing of ours refers to the cache's memory across a sleep, see `BlendExecutor.sleep`."""
        return True

    def shutdown(self) -> None:
        if self.executor is not None:
            self.executor.close()
        if self._planner is not None:
            self._planner.close()
        if self._store is not None:
            self._store.close()

    # ---- scheduler -------------------------------------------------------------------------

    @property
    def planner(self) -> RequestPlanner:
        assert self._planner is not None, "asked of a worker's connector"
        return self._planner

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing that we store must arrive: what is not stored is computed again."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.planner.blocks.manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        gates = [part.gate for part in metadata.values() if isinstance(part, WorkerHandshake)]
        self.planner.gate = of_all_ranks(gates)

    def on_new_request(self, request: Request) -> None:
        self._precedence.arrived(request)
        self.planner.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._precedence.may_begin(request):
            return None, False
        external = self.planner.matched_tokens(request, num_computed_tokens)
        return external, bool(external)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduled = scheduled_ranges(scheduler_output)
        self._precedence.stepped({name: end for name, (_, end) in scheduled.items()})
        return self.planner.step(scheduled)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.planner.pace.step_ended()
        results = connector_output.kv_connector_worker_meta
        blends = results.blends if isinstance(results, WorkerResults) else {}
        blended = {name for name, blend in blends.items() if blend.stats is not None}
        self.planner.blocks.give_back(connector_output.finished_recving or (), blended)
        if isinstance(results, WorkerResults):
            self.planner.results(results)
            for blend in results.blends.values():
                if blend.stats is None:
                    self._precedence.took_back(blend.request_id)
        self._precedence.updated()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._precedence.ended(request)
        return False, self.planner.finished(request)

    def get_kv_connector_stats(self) -> ReuseStats | None:
        """Statistics of the scheduler's side, where requests end."""
        return None if self._planner is None else self._planner.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ReuseStats | None:
        return ReuseStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ReuseMetrics:
        return ReuseMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker ----------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self.executor is None else WorkerHandshake(self.executor.gate)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.executor is not None
        assert isinstance(connector_metadata, StepMetadata)
        self.executor.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self.executor is not None
        self.executor.blend()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request of the forward is being blended."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to save yet: whole blocks are copied behind the forward, see `wait_for_save`."""

    def wait_for_save(self) -> None:
        assert self.executor is not None
        self.executor.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request is sent anywhere; those whose blends ended, or were stopped with the request."""
        assert self.executor is not None
        return None, self.executor.take_ended(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Those of `get_finished`, and which of them vLLM has to compute."""
        assert self.executor is not None
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self.executor.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.executor is not None
        return self.executor.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerResults | None:
        assert self.executor is not None
        return self.executor.take_results()
