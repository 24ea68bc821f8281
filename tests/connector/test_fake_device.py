"""Blends and captures on a device whose tensors do not mix with the host's: `workbench.fake_device`.

What is seen there is what a GPU would refuse, not what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from semkv_rag.engine import Engine
from semkv_rag.store.codecs import codec_names
from workbench import loaded_by_kernel
from workbench.answers import assert_same, blended, plain
from workbench.chunks import Stored, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.fake_device import install
from workbench.inside import inside, open_chunk_files
from workbench.settings import READER

CONTEXT, OTHER_CONTEXT = random_tokens(960, 40), random_tokens(961, 40)
PREFIX, QUESTION = random_tokens(962, 21), random_tokens(963, 12)


@pytest.fixture(scope="module")
def on_device(engines: Engines) -> Iterator[Engine]:
    with engines.own(READER) as engine:
        assert inside(engine, install) == (True, None)
        yield engine


def stored(engine: Engine, namespace: str, first: int = 1) -> tuple[list[Stored], list[int]]:
    """Three chunks with their sensitivity, and a prompt of them."""
    chunks = store_chunks(
        engine,
        [random_tokens(first + seed, 90) for seed in range(3)],
        namespace=namespace,
        context=CONTEXT,
        reference=OTHER_CONTEXT,
    )
    return chunks, PREFIX + [token for chunk in chunks for token in chunk.tokens] + QUESTION


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.2},
        {"ratio": 0.2, "token_map": True},
        {"ratio": "auto"},
        {"ratio": 0.2, "selector": "kv_deviation"},
        {"ratio": 0.2, "selector": "query_attention"},
        {"ratio": 0.2, "selector": "chunk_head"},
        {"ratio": 0.0},
        {"ratio": 1.0},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_blends_are_those_of_the_cpu(
    engine: Engine, on_device: Engine, namespace: str, options: dict[str, object]
) -> None:
    answers = []
    for each in (engine, on_device):
        _, prompt = stored(each, namespace)
        answers.append(blended(each, prompt, namespace=namespace, **options))
        each.reset_prefix_cache()
    here, there = answers
    assert there.report.reused_tokens == here.report.reused_tokens == 270
    assert there.report.recomputed_tokens == here.report.recomputed_tokens
    assert there.report.risk == pytest.approx(here.report.risk, rel=1e-3)
    maps = [report.token_map for report in (here.report, there.report)]
    computed = [
        None if one is None else [(span.recomputed, span.scores) for span in one.spans]
        for one in maps
    ]
    assert computed[0] == computed[1]
    assert_same(there, here)
    if options["ratio"] == 1.0:
        assert_same(there, plain(on_device, prompt))


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(False, id="decoded", marks=pytest.mark.soak),
        pytest.param(True, id="by the kernel"),
    ],
)
def test_each_codec(on_device: Engine, namespace: str, codec: str, kernel: bool) -> None:
    """`kernel`: with torch in its place, as in `test_kernel_loading`."""
    _, prompt = stored(on_device, namespace)
    assert on_device.store is not None
    assert on_device.store.recode(codec, namespace=namespace).failures == ()
    on_device.reset_prefix_cache()
    right = blended(on_device, prompt, namespace=namespace, ratio=0.2)
    on_device.reset_prefix_cache()
    if kernel:
        load = loaded_by_kernel.load_in_torch
        assert inside(on_device, lambda worker: loaded_by_kernel.install(worker, load))
    try:
        got = blended(on_device, prompt, namespace=namespace, ratio=0.2)
    finally:
        inside(on_device, loaded_by_kernel.remove)
        on_device.reset_prefix_cache()
    assert got.report.reused_tokens == 270
    assert_same(got, right)


def test_several_at_once(on_device: Engine, namespace: str) -> None:
    prompts = [stored(on_device, namespace, first)[1] for first in (1, 11, 21, 31)]
    alone = [plain(on_device, prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(blended, on_device, prompt, namespace=namespace, ratio=1.0)
            for prompt in prompts
        ]
        others = [pool.submit(plain, on_device, prompt) for prompt in prompts]
        for right, got, other in zip(alone, asked, others, strict=True):
            assert got.result().report.reused_tokens == 270
            assert_same(got.result(), right)
            assert_same(other.result(), right)


def test_a_torn_file_among_those_that_are_read_ahead(on_device: Engine, namespace: str) -> None:
    chunks, prompt = stored(on_device, namespace)
    assert on_device.store is not None
    path = on_device.store.path(on_device.fingerprint, namespace, chunks[1].id)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 2 // 3)
        file.write(b"\x55" * 64)
    got = blended(on_device, prompt, namespace=namespace, ratio=0.2)
    assert got.report.reason is not None
    assert got.report.reused_tokens == 0
    assert_same(got, plain(on_device, prompt))
    assert open_chunk_files(on_device) == []
