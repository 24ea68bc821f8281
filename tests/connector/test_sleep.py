"""An engine that sleeps, and a model that stops handing over its keys: what is ours is given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import Engine
from semkv_rag.reuse import token_array
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside


@pytest.fixture(scope="module")
def sleeper(engines: Engines, reader: Path) -> Iterator[Engine]:
    """An engine that ends refusing reuse."""
    with engines.own(reader) as engine:
        yield engine


def test_a_layer_that_writes_its_own_kv(sleeper: Engine) -> None:
    def refused(worker: Any) -> str:
        from semkv_rag.connector.worker.model.model_view import Unservable, model_layers

        model = worker.model_runner.get_model()
        attention = model_layers(model, worker.vllm_config)[1].attention
        attention.kv_cache_update_bypass = True
        try:
            model_layers(model, worker.vllm_config)
        except Unservable as reason:
            return str(reason)
        finally:
            attention.kv_cache_update_bypass = False
        return "served"

    assert "the model writes its KV itself" in inside(sleeper, refused)


def test_a_layer_whose_keys_nobody_sees(sleeper: Engine) -> None:
    def refused(worker: Any) -> str | None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from semkv_rag.connector.worker.gate import run_gate

        blend_pass = get_kv_transfer_group().executor._blend_pass
        tap = blend_pass.setting.model.tap
        impl = tap._layers[1].attention.impl
        tapped, impl.do_kv_cache_update = impl.do_kv_cache_update, tap._update[1]
        try:
            dtype = worker.model_runner.dtype
            return run_gate(blend_pass, vocabulary=480, block_size=32, blocks=9, dtype=dtype).reason
        finally:
            impl.do_kv_cache_update = tapped

    reason = inside(sleeper, refused)
    assert reason is not None
    assert "it writes KV itself" in reason


def remembered_picks(engine: Engine) -> int:
    """How many plans the worker remembers the picked tokens of."""

    def count(worker: Any) -> int:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return len(get_kv_transfer_group().executor._blend_pass.picked)

    return inside(engine, count)


def test_asleep_and_awake_again(sleeper: Engine) -> None:
    chunk = random_tokens(71, 64)
    store_chunks(sleeper, [chunk], namespace="sleep")
    prompts = [[*random_tokens(72 + n, 5), *chunk, *random_tokens(80 + n, 9)] for n in range(2)]
    options = {"namespace": "sleep", "ratio": 0.25}
    assert blended(sleeper, prompts[0], **options).report.reused_tokens == 64
    assert remembered_picks(sleeper) > 0
    inside(sleeper, lambda worker: worker.sleep(1))
    assert remembered_picks(sleeper) == 0
    inside(sleeper, lambda worker: worker.wake_up())
    assert blended(sleeper, prompts[1], **options).report.reused_tokens == 64


def test_with_other_weights_nothing_is_reused_or_stored(sleeper: Engine) -> None:
    chunk, other = random_tokens(91, 64), random_tokens(92, 64)
    store_chunks(sleeper, [chunk], namespace="sleep")
    inside(sleeper, lambda worker: worker.sleep(2))
    prompt = [*random_tokens(93, 5), *chunk, *random_tokens(94, 9)]
    answer = blended(sleeper, prompt, namespace="sleep", ratio=0.25)
    assert answer.report.reused_tokens == 0
    assert answer.report.reason is not None
    assert "weights were given up" in answer.report.reason
    assert_same(answer, plain(sleeper, prompt))
    item = CaptureItem("0" * 64, "sleep", "document", token_array(other), token_array([]))
    (captured,) = sleeper.capture([item])
    assert captured.error is not None
    assert "weights were given up" in captured.error
