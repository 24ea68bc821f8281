"""What travels between the connector's two sides.

Scheduler to workers, once a step: `StepMetadata`, with its `BlendTask`s and `CaptureTask`s.
Workers to scheduler, once a step: `WorkerResults`, with a `BlendResult` for each blend.
Workers to scheduler, once at start-up: `WorkerHandshake`, with the `GateReport`.
Workers to the user's process, when it asks: `Captured` and `GateReport`, as plain fields.

What a request says of itself, and its report, travel under the keys in `semkv_rag.wire`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from semkv_rag.reuse import ReusePlan

CaptureRole: TypeAlias = Literal["stored", "reference", "compared"]


@dataclass(frozen=True)
class GateReport:
    """Whether a model is served with reuse; if not, `reason` says why, in words.

    Attributes:
        largest_error: the largest relative error met in the checks, 0 when none was run.
    """

    servable: bool
    reason: str | None = None
    largest_error: float = 0.0


@dataclass(frozen=True)
class BlendTask:
    """One request's blend in one step; made by the scheduler side, run by every worker.

    Attributes:
        tokens: the prompt's first `plan.covered` tokens.
        block_ids: the request's blocks, in order; they hold at least those tokens.
        start: the tokens before it are in the cache already.
        end: where the tokens end that this step's forward computes behind the blend.
        images: whether images stand among these tokens: their placeholders are no text, so the
            tokens cannot be computed here.
    """

    request_id: str
    plan: ReusePlan
    tokens: list[int]
    block_ids: list[int]
    start: int
    end: int = 0
    images: bool = False

    def key(self) -> bytes:
        """32 bytes that two tasks share only when plan and tokens are the same."""
        tokens = np.asarray(self.tokens, dtype=np.int32).tobytes()
        return blake3(self.plan.digest() + tokens).digest()


@dataclass(frozen=True)
class BlendStats:
    """What a blend pass did. `recomputed` counts reused tokens only, and is the mean over layers."""

    recomputed: int
    charged_ratio: float
    load_ms: float
    blend_ms: float
    risk: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class CaptureTask:
    """A chunk that is whole in the paged cache once the step has run.

    Attributes:
        ticket: the number by which the one who asked for the capture knows it.
        chunk_id, namespace, kind: the chunk's identity, as in its file's header.
        tokens: the prompt: the chunk's context, then the chunk.
        context: how many of them are the context, which is not stored.
        block_ids: the prompt's blocks, from the one with the chunk's first token on.
        role: `stored`; or `compared`: stored with how far its V are from those of the task with the
            same ticket that came before, whose role is `reference` and which is not stored.
    """

    ticket: int
    chunk_id: str
    namespace: str
    kind: str
    tokens: list[int]
    context: int
    block_ids: list[int]
    role: CaptureRole = "stored"


@dataclass(frozen=True)
class Captured:
    """What became of one capture on one rank.

    Attributes:
        ticket: as in its task.
        bytes: its file's size; 0 when there is none.
        error: in words, why there is none.
    """

    ticket: int
    bytes: int
    error: str | None = None


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
