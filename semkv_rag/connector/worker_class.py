"""The worker class: the platform's own, which hands its model runner to the connector.

A KV connector is given the paged cache but not the model; a blend needs both. vLLM makes a worker
class of one's own an option (`worker_cls`), so nothing has to be patched.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from semkv_rag.connector.connector import SemKVConnector
from semkv_rag.connector.executor_class import spin_briefly
from semkv_rag.connector.images.connector import ImageFeatureConnector
from semkv_rag.connector.messages import GateReport
from semkv_rag.connector.worker.executor import BlendExecutor
from semkv_rag.connector.worker.model.rewind import rewind
from semkv_rag.connector.worker.model.whole_windows import leave_sinks_whole, whole_windows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif current_platform.is_xpu():
    from vllm.v1.worker.xpu_worker import XPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class SemKVWorker(PlatformWorker):
    """vLLM's worker for this platform, with the connector bound to its model runner."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called once, first, before the worker makes its queues."""
        if current_platform.is_cpu():
            spin_briefly()
        super().load_model(*args, **kwargs)
        leave_sinks_whole(self.vllm_config)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Called once, before the KV cache is allocated; `whole_windows` says what is changed where
        vLLM's hybrid KV cache manager is off."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        if not self.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            return specs
        return whole_windows(specs, self.vllm_config.cache_config.block_size)

    def compile_or_warm_up_model(self) -> Any:
        """Called once, behind loading, profiling and the allocation of the KV cache."""
        times = super().compile_or_warm_up_model()
        if (executor := _executor()) is not None:
            executor.bind(self.model_runner)
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Called for each step; `rewind` says why it is ours to look at, `blend_behind_step` why
        stages of a pipeline blend here."""
        if (states := getattr(self.model_runner, "req_states", None)) is not None:
            rewind(states, scheduler_output.scheduled_cached_reqs)
        output = super().execute_model(scheduler_output)
        if (executor := _executor()) is not None:
            executor.blend_behind_step()
        return output

    def sleep(self, level: int = 1) -> None:
        """Called when nothing runs: the paged cache, and at level 2 the weights, are given up."""
        if (executor := _executor()) is not None:
            executor.sleep(weights_go=level > 1)
        super().sleep(level)

    # Asked for through `collective_rpc`, which carries plain values only.

    def semkv_gate(self) -> dict[str, Any]:
        """The fields of the gate's report."""
        executor = _executor()
        if executor is None:
            return asdict(GateReport(False, "the KV connector is not configured"))
        return asdict(executor.gate)

    def semkv_probe(self, name: str, size: int) -> dict[str, Any]:
        """What one of `PROBES` finds; see `semkv_rag.connector.worker.probe`."""
        executor = _executor()
        assert executor is not None and executor.gate.servable
        return executor.probe(name, size, self.model_runner)

    def semkv_add_lora(self, fields: dict[str, Any]) -> str | None:
        """Load an adapter; in words why it cannot be loaded, or None. `ReportingLLM.add_lora` says why it
        does not raise.

        Args:
            fields: of vLLM's `LoRARequest`.
        """
        try:
            self.add_lora(LoRARequest(**fields))
        except Exception as error:
            return str(error) or repr(error)
        return None

    def semkv_take_captures(self) -> list[dict[str, Any]]:
        """The fields of `Captured`, for chunks whose capture ended and that nobody was told of."""
        executor = _executor()
        return [asdict(captured) for captured in executor.take_captures()] if executor else []

    def semkv_flush_states(self) -> None:
        """Wait until the image features that were computed so far are stored."""
        if has_ec_transfer() and isinstance(connector := get_ec_transfer(), ImageFeatureConnector):
            connector.writer.flush()


def _executor() -> BlendExecutor | None:
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector.executor if isinstance(connector, SemKVConnector) else None
