"""What travels between the connector's two sides.

Scheduler to workers, once a step: `StepMetadata`, with `ReadAhead`s, `BlendTask`s, `FirstForward`s and
`CaptureTask`s.
Workers to scheduler, once a step: `WorkerResults`, with a `BlendResult` for each blend that ended.
Workers to scheduler, once at start-up: `WorkerHandshake`, with the `GateReport`.
Workers to the user's process, when it asks: `Captured` and `GateReport`, as plain fields.

What a request says of itself, and its report, travel under the keys in `semkv_rag.wire`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from semkv_rag.connector.adapter import Adapter
from semkv_rag.connector.images.blended import BlendImage
from semkv_rag.connector.metrics import Fault
from semkv_rag.reuse import ReusePlan

CaptureRole: TypeAlias = Literal["stored", "reference", "compared"]

Blocks: TypeAlias = tuple[list[int], ...]
"""The ids of a request's blocks, in order, for each group of layers that has a block table of its own."""

NULL_BLOCK = 0
"""vLLM's id where a request has no block, because a layer's window has left it behind."""


@dataclass(frozen=True)
class GateReport:
    """Whether a model is served with reuse; if not, `reason` says why, in words.

    Attributes:
        largest_error: the largest relative error met in the checks, 0 when none was run.
    """

    servable: bool
    reason: str | None = None
    largest_error: float = 0.0


REFUSED_ON_ANOTHER_RANK = "it was refused on another rank"
"""Why a rank's gate refuses, where another rank knows why."""


def of_all_ranks(gates: Sequence[GateReport]) -> GateReport:
    """What the gates of all ranks found, at least one: one that refuses and knows why, if any does."""
    refused = [gate for gate in gates if not gate.servable]
    known = [gate for gate in refused if gate.reason != REFUSED_ON_ANOTHER_RANK]
    return next(iter(known or refused or gates))


@dataclass(frozen=True)
class BlendTask:
    """One request's blend; made by the scheduler side, run by every worker over one or more steps.

    Attributes:
        tokens: the prompt's first `plan.covered` tokens.
        block_ids: the request's blocks, in order; they hold at least those tokens.
        start: the tokens before it are in the cache already, behind the forward of the task's step.
        model: what its chunks are stored under; empty where nothing is read from files.
        adapter: the request's; None for the model alone.
        no_room: in words, why its blocks cannot be filled, if they cannot.
        behind: the prompt's next tokens, with which the blend sees whether the model gives numbers. Empty
            where the request's first forward tells, and vLLM takes the request back.
        images: those of which it computes rows, or which say where tokens stand; in prompt order.
    """

    request_id: str
    plan: ReusePlan
    tokens: list[int]
    block_ids: Blocks
    start: int
    model: str = ""
    adapter: Adapter | None = None
    no_room: str | None = None
    behind: Sequence[int] = ()
    images: tuple[BlendImage, ...] = ()

    def key(self) -> bytes:
        """32 bytes that two tasks share only when plan, tokens, images and adapter are the same."""
        tokens = np.asarray(self.tokens, dtype=np.int32).tobytes()
        adapter = b"" if self.adapter is None else bytes.fromhex(self.adapter.digest)
        images = repr([image.feature.identifier for image in self.images]).encode()
        return blake3(self.plan.digest() + adapter + tokens + images).digest()


@dataclass(frozen=True)
class ReadAhead:
    """The chunks of a request that has its plan, and waits for its blocks.

    Attributes:
        model: what they are stored under.
        chunks: the id and the codec of each.
    """

    request_id: str
    model: str
    namespace: str
    chunks: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SeenTokens:
    """What a blend did with each token, by its position in the prompt.

    Attributes:
        recomputed: those that were computed again, [begin, end) of each run.
        start: of the blend; `scores` has a character for each token from there on: a digit, how much the
            selector wanted it computed, or a space where it was not asked.
    """

    recomputed: tuple[tuple[int, int], ...]
    start: int
    scores: str


@dataclass(frozen=True)
class BlendStats:
    """What a blend pass did. `recomputed` counts reused tokens only, and is the mean over layers.

    Attributes:
        memory_bytes: of the chunks that were used, those that stood in memory, or were read ahead.
        file_bytes: of them, those that were read from files of this machine meanwhile.
        object_bytes: of them, those that were fetched from the object store.
        began_at, picked_at: when it began and when it had picked, seconds since the epoch;
            `picked_at` is None where it picked without a look at the KV.
        seen: what it did with each token; None where the request did not ask for its token map.
    """

    recomputed: int
    charged_ratio: float
    load_ms: float
    blend_ms: float
    risk: float | None = None
    note: str | None = None
    memory_bytes: int = 0
    file_bytes: int = 0
    object_bytes: int = 0
    began_at: float = 0.0
    picked_at: float | None = None
    seen: SeenTokens | None = None

    def with_bytes_of(self, other: BlendStats) -> BlendStats:
        """This, with the bytes of another rank's chunk files added. All else is one rank's."""
        return replace(
            self,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            file_bytes=self.file_bytes + other.file_bytes,
            object_bytes=self.object_bytes + other.object_bytes,
        )


@dataclass(frozen=True)
class FirstForward:
    """The first forward of a request behind its blend.

    Attributes:
        block_ids: the request's blocks, in order.
        start: where its blend began.
        end: where the tokens end that the forward computes.
        chunk_ids: whose KV it reads.
    """

    request_id: str
    block_ids: Blocks
    start: int
    end: int
    chunk_ids: tuple[str, ...]


@dataclass(frozen=True)
class CaptureTask:
    """A chunk that is whole in the paged cache once the step has run.

    Attributes:
        ticket: the number by which the one who asked for the capture knows it.
        chunk_id, model, namespace, kind: the chunk's identity, as in its file's header.
        tokens: the prompt: the chunk's context, then the chunk.
        context: how many of them are the context, which is not stored.
        block_ids: the prompt's blocks, from the one with the chunk's first token on.
        role: `stored`; or `compared`: stored with how far its V are from those of the task with the
            same ticket that came before, whose role is `reference` and which is not stored.
        adapter: that has to have computed it; None for the model alone.
    """

    ticket: int
    chunk_id: str
    model: str
    namespace: str
    kind: str
    tokens: list[int]
    context: int
    block_ids: Blocks
    role: CaptureRole = "stored"
    adapter: Adapter | None = None


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
    """The work of one step, behind its forward.

    Attributes:
        ahead: the chunks of requests that were planned since the last step, and wait.
        blends: that begin; they take turns in the order in which they began.
        budget_tokens: so many tokens the blends may compute.
        idle: whether no step under way has a forward: a blend may wait for what is being loaded.
        first_forwards: those of requests that were blended.
    """

    ahead: list[ReadAhead] = field(default_factory=list)
    blends: list[BlendTask] = field(default_factory=list)
    budget_tokens: int = 0
    idle: bool = True
    first_forwards: list[FirstForward] = field(default_factory=list)
    captures: list[CaptureTask] = field(default_factory=list)

    def anon_repr(self) -> str:
        """What vLLM writes into its log when the engine fails: nobody's tokens or names."""
        return f"StepMetadata({len(self.blends)} blends, {len(self.captures)} captures)"

    __repr__ = anon_repr


ON_ANOTHER_RANK = "a chunk file could not be read on another rank"
"""Why a blend failed, where another rank knows why."""


@dataclass(frozen=True)
class BlendResult:
    """How one request's blend ended.

    Attributes:
        stats: what the blend did; None when it failed and vLLM computes the tokens.
        error: in words, why it failed.
        bad_chunks: the chunks whose files were the reason.
        fault: what went wrong; None where nothing did.
    """

    request_id: str
    stats: BlendStats | None
    error: str | None = None
    bad_chunks: tuple[str, ...] = ()
    fault: Fault | None = None


@dataclass
class WorkerResults(KVConnectorWorkerMetadata):
    """The blends that ended in one step, on one rank.

    Attributes:
        stall_s: what blends added to the step, seconds, if others were served in it; one rank's, as all
            wait for each other.
        adapters: the digests of those that were loaded since the last results, by vLLM's number.
    """

    blends: dict[str, BlendResult]
    stall_s: float | None = None
    adapters: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerResults:
        """One rank's failure is everybody's: all ranks prefill when one cannot load. The rank that knows
        why tells it. Each rank has loaded files of its own."""
        assert isinstance(other, WorkerResults)
        merged = {**other.blends, **self.blends}
        for request_id in self.blends.keys() & other.blends.keys():
            own, result = self.blends[request_id], other.blends[request_id]
            if own.stats is not None and result.stats is not None:
                stats = own.stats.with_bytes_of(result.stats)
                merged[request_id] = replace(own, stats=stats)
            elif result.error is not None and own.error in (None, ON_ANOTHER_RANK):
                merged[request_id] = result
        stall_s = other.stall_s if self.stall_s is None else self.stall_s
        return WorkerResults(merged, stall_s, {**self.adapters, **other.adapters})


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What the gate found on one rank."""

    gate: GateReport
