"""Precompute on a real Ray cluster on this machine stores exactly what one engine stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from semkv_rag.corpus import PrecomputeProgress, PrecomputeResult, precompute
from semkv_rag.engine import Engine, LoRARequest
from semkv_rag.errors import StoreError
from semkv_rag.on_ray import EngineResources, precompute_on_ray
from semkv_rag.store import ChunkFile, KVStore
from workbench.adapters import build_adapter
from workbench.engines import Engines
from workbench.settings import ENGINE_ARGS

pytestmark = [pytest.mark.engine, pytest.mark.soak]

HOW: dict[str, Any] = {"chunk_tokens": 32, "prefix": "answer by these passages :"}


@pytest.fixture(scope="module")
def one(engines: Engines, reader: Path, docs: Path) -> Iterator[tuple[Engine, PrecomputeResult]]:
    """One engine that has stored the documents."""
    with engines.own(reader) as engine:
        yield engine, precompute(engine, [docs], **HOW)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on-ray")


@pytest.fixture(scope="module")
def run(
    ray_here: Any, reader: Path, docs: Path, root: Path
) -> tuple[PrecomputeResult, list[PrecomputeProgress]]:
    """What two engines on Ray made of the documents."""
    told: list[PrecomputeProgress] = []
    result = precompute_on_ray(
        str(reader), [docs], store=root, on_progress=told.append, **HOW, **ENGINE_ARGS
    )
    return result, told


def test_the_result_is_that_of_one_engine(
    one: tuple[Engine, PrecomputeResult], run: tuple[PrecomputeResult, list[PrecomputeProgress]]
) -> None:
    alone, (result, told) = one[1], run
    assert (result.documents, result.changed, result.unchanged) == (17, 16, 0)
    assert result.failures == alone.failures != []
    # What several documents have may be computed by both engines at once; here, the prompt prefix.
    assert alone.chunks_captured <= result.chunks_captured <= alone.chunks_captured + 3
    computing = [one for one in told if one.phase == "computing"]
    assert computing[-1].documents == computing[-1].documents_total == 16
    assert computing[-1].share == 1
    assert len(computing) > 4, "documents went out in parcels"


def test_the_store_is_that_of_one_engine(
    one: tuple[Engine, PrecomputeResult],
    run: tuple[PrecomputeResult, list[PrecomputeProgress]],
    root: Path,
) -> None:
    engine = one[0]
    assert engine.store is not None
    with KVStore(root, read_only=True) as store:
        assert store.verify().ok
        ours, theirs = list(store.chunks()), list(engine.store.chunks())
        assert [(c.id, c.kind, c.bytes) for c in ours] == [(c.id, c.kind, c.bytes) for c in theirs]
        assert [(s.name, s.digest, s.chunk_ids) for s in store.sources()] == [
            (s.name, s.digest, s.chunk_ids) for s in engine.store.sources()
        ]
        for chunk in ours:
            mine, its = (
                ChunkFile(kept.path(chunk.model, chunk.namespace, chunk.id), model=chunk.model)
                for kept in (store, engine.store)
            )
            with mine, its:
                assert mine.header.tokens.tolist() == its.header.tokens.tolist()
                assert mine.header.context.tolist() == its.header.context.tolist()
                for layer in range(mine.header.layers):
                    for a, b in zip(mine.layer(layer), its.layer(layer), strict=True):
                        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_second_run_starts_no_engine_and_both_ways_go_on_from_each_other(
    one: tuple[Engine, PrecomputeResult],
    run: tuple[PrecomputeResult, list[PrecomputeProgress]],
    reader: Path,
    docs: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("semkv_rag.on_ray.precompute.share", _not_to_be_called)
    engine = one[0]
    assert engine.store is not None
    for where in (root, engine.store.root):
        again = precompute_on_ray(str(reader), [docs], store=where, **HOW, **ENGINE_ARGS)
        assert (again.unchanged, again.changed, again.chunks_captured) == (16, 0, 0)
        assert len(again.failures) == 1


def test_what_stops_a_run_is_an_error_of_ours(
    ray_here: Any,
    run: tuple[PrecomputeResult, list[PrecomputeProgress]],
    reader: Path,
    docs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("semkv_rag.on_ray.precompute.store_identity", lambda root: "0" * 32)
    with pytest.raises(StoreError, match="is not the store that stands there"):
        precompute_on_ray(
            str(reader),
            [docs],
            store=tmp_path / "store",
            resources=EngineResources(engines=1),
            **HOW,
            **ENGINE_ARGS,
        )


def test_an_adapter_s_chunks_are_those_of_one_engine(
    ray_here: Any,
    engines: Engines,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = tiny_model("qwen3")
    folder = build_adapter(model, tmp_path / "adapter", seed=1)
    (tmp_path / "docs").mkdir()
    for number in range(4):
        (tmp_path / "docs" / f"{number}.txt").write_text(
            f"what is said in document {number}. " * 40
        )
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    result = precompute_on_ray(
        str(model),
        [tmp_path / "docs"],
        store=tmp_path / "store",
        lora=("a", str(folder)),
        **{**ENGINE_ARGS, **arguments},
    )
    assert (result.changed, result.failures) == (4, [])
    with engines.own(model, **arguments) as engine:
        precompute(engine.with_adapter(LoRARequest("b", 7, str(folder))), [tmp_path / "docs"])
        assert engine.store is not None
        with KVStore(tmp_path / "store", read_only=True) as store:
            assert store.verify().ok
            ours, theirs = list(store.chunks()), list(engine.store.chunks())
        assert {chunk.model for chunk in ours} != {engine.fingerprint}
        assert [(c.id, c.model, c.bytes) for c in ours] == [
            (c.id, c.model, c.bytes) for c in theirs
        ]


def _not_to_be_called(*_: object) -> None:
    raise AssertionError("an engine was to be started")
