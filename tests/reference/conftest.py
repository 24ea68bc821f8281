"""Models and one prompt that has every kind of span in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from semkv_rag.config import ReuseOptions
from semkv_rag.reuse.plan import ReusePlan, Span
from tests.reference import ReferenceModel, StoredKV
from workbench.tiny_models import LATENT, SERVABLE, WINDOWED, build_tiny_model

LoadModel = Callable[[str], ReferenceModel]


@pytest.fixture(scope="session")
def load_model(tmp_path_factory: pytest.TempPathFactory) -> LoadModel:
    """A tiny model by architecture, built once a session."""

    @cache
    def load(arch: str) -> ReferenceModel:
        return ReferenceModel(build_tiny_model(arch, tmp_path_factory.mktemp(arch)))

    return load


@pytest.fixture(params=[*SERVABLE, *WINDOWED, *LATENT])
def model(request: pytest.FixtureRequest, load_model: LoadModel) -> ReferenceModel:
    """Each servable architecture in turn."""
    return load_model(request.param)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 512, (count,), generator=generator).tolist()


PREFIX = random_tokens(7, seed=1)
FIRST, SECOND, THIRD = (random_tokens(24, seed) for seed in (2, 3, 4))
OTHER_CONTEXT = random_tokens(50, seed=5)
BETWEEN = random_tokens(4, seed=6)
QUESTION = random_tokens(9, seed=7)


@dataclass(frozen=True)
class Case:
    """A prompt with spans: exact, cut at both ends, behind a context longer than its place, repeated."""

    prompt: list[int]
    spans: tuple[Span, ...]
    stored: dict[str, StoredKV]

    def plan(self, **options: object) -> ReusePlan:
        """With CacheBlend's own rule unless another is named."""
        chosen = ReuseOptions.from_mapping({"selector": "kv_deviation", **options})
        return ReusePlan(self.spans, self.spans[-1].end, chosen)


def mixed_case(model: ReferenceModel) -> Case:
    return Case(
        prompt=PREFIX + FIRST + SECOND[3:20] + BETWEEN + THIRD + SECOND + QUESTION,
        spans=(
            Span("first", src=0, dst=7, length=24, base=7, exact=True),
            Span("second", src=3, dst=31, length=17),
            Span("third", src=0, dst=52, length=24, base=50),
            Span("second", src=0, dst=76, length=24),
        ),
        stored={
            "first": model.stored(PREFIX, FIRST),
            "second": model.stored([], SECOND),
            "third": model.stored(OTHER_CONTEXT, THIRD),
        },
    )
