"""What travels between the two halves of the connector, and between them and a request.

Scheduler to workers, once a step: `StepMetadata`. Workers to scheduler, once a step: `WorkerResults`.
Workers to scheduler, once at start-up: `WorkerHandshake`. A request's own wishes come in
`SamplingParams.extra_args["kv_transfer_params"]["semkv"]`, its report leaves the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from semkv_rag.engine.blend_pass import BlendStats, BlendTask
from semkv_rag.engine.capture import CaptureTask
from semkv_rag.engine.gate import GateReport

TRANSFER_FIELD = "kv_transfer_params"
"""The field of OpenAI's requests and answers that carries our params and our report."""

PARAMS_KEY = "semkv"
"""Our key in a request's `kv_transfer_params`, on the way in and on the way out."""

CAPTURE_KEY = "capture"
"""In our params: this request's prompt is to be captured. Only the engine's own process sets it.

With `in_passing` it is a caller's request, which is served with reuse where that is possible, and then
not captured, unless `behind_exact` is set and all that is reused is an exact head. Without, it is there
for the capture alone.
"""

CAPTURED_KEY = "captured"
"""Beside the report, on its way to the engine's own process: the request was captured."""

NEAR_IMAGES_KEY = "near_images"
"""In our params: images, by key, that are taken for a stored one, whose key it gives."""

ANSWER_TOKENS_KEY = "answer_tokens"
"""In our params: how many tokens at the prompt's end are an answer to it, whose log-probabilities are
asked for. All that stands before is planned as though it came alone."""

STORE_IMAGES_KEY = "store_images"
"""In our params: whether the features of this request's images are stored. Only the engine's own
process sets it, as it does with `near_images`."""

OURS_ALONE = frozenset(
    {"namespace", CAPTURE_KEY, NEAR_IMAGES_KEY, ANSWER_TOKENS_KEY, STORE_IMAGES_KEY}
)
"""In our params: what only the engine's own process may set, and a client of another server may not."""


@dataclass(repr=False)
class StepMetadata(KVConnectorMetadata):
    """The work of one step: blends before the forward, in this order, captures behind it."""

    model: str
    blends: list[BlendTask] = field(default_factory=list)
    captures: list[CaptureTask] = field(default_factory=list)

    def anon_repr(self) -> str:
        """What vLLM writes into its log when the engine fails: nobody's tokens or names."""
        return f"StepMetadata({len(self.blends)} blends, {len(self.captures)} captures)"

    __repr__ = anon_repr


@dataclass(frozen=True)
class BlendResult:
    """How one request's blend ended.

    Attributes:
        stats: what the blend did; None when it failed and the tokens were prefilled instead.
        error: in words, why it failed.
        bad_chunks: the chunks whose files were the reason.
    """

    request_id: str
    stats: BlendStats | None
    error: str | None = None
    bad_chunks: tuple[str, ...] = ()


@dataclass
class WorkerResults(KVConnectorWorkerMetadata):
    """The blends that ended in one step, on one rank."""

    blends: dict[str, BlendResult]

    arrived: ClassVar[list[WorkerResults]] = []
    """Results that came from another process and were not looked at yet.

    vLLM hands a step's results to the scheduler's connector only behind the requests that end in that
    step, so an answer of one token would have no figures. They are there before: from the moment they
    are unpickled.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.arrived.append(self)

    @classmethod
    def take_arrived(cls) -> dict[str, BlendResult]:
        """What arrived since the last call, all ranks together."""
        taken = WorkerResults({})
        while cls.arrived:
            taken = taken.aggregate(cls.arrived.pop(0))
        return taken.blends

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerResults:
        """One rank's failure is everybody's: all ranks prefill when one cannot load."""
        assert isinstance(other, WorkerResults)
        merged = dict(self.blends)
        for request_id, result in other.blends.items():
            if request_id not in merged or result.error is not None:
                merged[request_id] = result
        return WorkerResults(merged)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What the gate found on one rank."""

    gate: GateReport
