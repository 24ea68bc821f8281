"""Which LLM objects share an engine: those whose engines would be the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.llm import close_engines, shared_engine
from semkv_rag.prompt_cache import PerceptualHash, PromptCacheOptions


class Started:
    """Stands for an engine: says what it was started with."""

    def __init__(self, model: str, **options: Any) -> None:
        self.options = options

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("semkv_rag.engine.Engine", Started)
    yield
    close_engines()


def test_tiers_are_part_of_the_key() -> None:
    hashes = PerceptualHash()
    kinds: list[tuple[Any, Any]] = [
        (None, None),
        ({}, None),
        ({"threshold": 0.9}, None),
        ({}, {"vision": "phash"}),
        ({}, {"vision": hashes}),
        ({}, {"vision": PerceptualHash()}),
    ]
    engines = [shared_engine("m", "s", None, {}, {}, *kind) for kind in kinds]
    assert len({id(engine) for engine in engines}) == len(kinds)
    again = [shared_engine("m", "s", None, {}, {}, *kind) for kind in kinds[:5]]
    assert again == engines[:5]
    assert shared_engine("m", "s", None, {}, None, PromptCacheOptions(), {}) is engines[1]


def test_what_the_engine_is_given() -> None:
    engine: Any = shared_engine("m", "s", None, {}, {}, {"threshold": 0.9}, {"vision": "phash"})
    assert engine.options["prompt_cache"] == PromptCacheOptions(threshold=0.9)
    assert engine.options["encoders"]["vision"].name == "phash-8"
    plain: Any = shared_engine("m", "s", None, {})
    assert (plain.options["prompt_cache"], plain.options["encoders"]) == (None, None)


def test_a_ram_tier_is_part_of_the_key() -> None:
    sizes = (0, 1 << 20, 1 << 21)
    engines: list[Any] = [shared_engine("m", "s", None, {}, ram_bytes=size) for size in sizes]
    assert [engine.options["ram_bytes"] for engine in engines] == list(sizes)
    assert shared_engine("m", "s", None, {}, ram_bytes=1 << 20) is engines[1]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match=r"the layers are \['semantic'\]"):
        shared_engine("m", "s", None, {}, None, {"thresholds": {"vision": 0.9}})


def test_a_url_stays_one() -> None:
    engine: Any = shared_engine("m", "s3://bucket/kv", "postgresql://", {"cache_dir": "c"})
    assert (engine.options["store"], engine.options["cache_dir"]) == ("s3://bucket/kv", "c")
