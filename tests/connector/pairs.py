"""An engine and the reference beside it, with the same chunks stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.reuse import ReusePlan, Span, make_plan
from tests.reference import ReferenceModel, StoredKV
from workbench.chunks import Stored, Tokens


@dataclass
class Pair:
    """Both.

    Attributes:
        chunks: as the engine's store has them.
        stored: their KV as the reference computes it, by chunk.
        caches: whether vLLM has a prefix cache. For latents it has none on a CPU without AMX.
    """

    engine: Engine
    reference: ReferenceModel
    chunks: list[Stored]
    stored: Mapping[str, StoredKV]
    caches: bool = True


def plan_of(tokens: Tokens, spans: list[Span], options: ReuseOptions) -> ReusePlan:
    """What the engine plans for a prompt in which it finds these spans."""
    plan = make_plan(spans, len(tokens), options)
    assert plan is not None
    return plan.asking(tokens)


def assert_logprobs(answer: Completion, expected: torch.Tensor) -> None:
    """The first token's log-probabilities are these, [vocabulary]."""
    assert answer.logprobs is not None
    for token, logprob in answer.logprobs[0].items():
        assert abs(logprob - float(expected[token])) <= 1e-4
    assert answer.token_ids[0] == int(expected.argmax())
