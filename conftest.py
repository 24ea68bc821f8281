"""What tests share: models, and one engine for the whole session.

Starting vLLM takes half a minute, so tests that can share an engine do. They keep apart by namespace:
`namespace` is a fresh one for each test.

`make test` runs in two processes (pytest-xdist), each with an engine of its own on half of the cores:
most of the time goes into starting engines, which one core does. A file stays in one process, and so
does a folder of the integrations, whose files share more than the engine.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tests that look inside the engine's process send it a function (`collective_rpc`).
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

# A shell has what it starts in the background ignore Ctrl-C; the scripts that tests interrupt would, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    if own:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, own)))
        # PyTorch outside of vLLM: threads of two processes that wait for each other's cores spin.
        os.environ.setdefault("OMP_NUM_THREADS", str(len(own)))

if TYPE_CHECKING:
    from semkv_rag.engine import Engine
    from workbench.server import Server

ROOT = Path(__file__).parent
READER = ROOT / "examples" / "reader"

# Small enough that several engines fit beside each other, large enough that nothing is preempted.
ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": 32,
    "seed": 0,
}

# What takes minutes in one process begins first, so that both end at about the same time.
LONGEST = (
    "tests/engine/test_architectures.py",
    "llama-index-llms-semkv",
    "langchain-semkv",
    "tests/cli/test_engine_verbs.py",
    "tests/engine/test_fusion.py",
    "tests/engine/test_unservable.py",
    "tests/vqa/test_run.py",
    "tests/demo/test_query_engine.py",
)

_counter = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is shared by more than a file stays together; the longest first."""
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    place = {group: index for index, group in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(groups[item], len(place)))


def _group(item: pytest.Item) -> str:
    path = item.path.relative_to(ROOT)
    return path.parts[1] if path.parts[0] == "integrations" else str(path)


@pytest.fixture(scope="session")
def reader() -> Path:
    """The small trained model of the demo."""
    return READER


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny random model of an architecture, once a session."""
    from workbench.tiny_models import build_tiny_model

    folder = tmp_path_factory.mktemp("models")

    def model(arch: str) -> Path:
        path = folder / arch
        return path if path.exists() else build_tiny_model(arch, path)

    return model


@pytest.fixture(scope="session")
def engine(reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The session's engine: the reader in float32, with an empty store."""
    from semkv_rag.engine import Engine

    with Engine(str(reader), store=tmp_path_factory.mktemp("store"), **ENGINE_ARGS) as engine:
        yield engine


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{next(_counter)}"


@pytest.fixture(scope="session")
def server(reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`semkv serve` on the reader in a process of its own, with an empty store."""
    from workbench.server import Server

    with Server(reader, tmp_path_factory.mktemp("server")) as server:
        yield server
