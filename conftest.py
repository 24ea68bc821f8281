"""What tests share: models, engines, a server, and how all of it is spread over processes.

`make test` runs in four processes (pytest-xdist), which share the cores: while a test of one waits,
another's runs. An engine that tests of one file use is that file's; one that several files use is a
fixture here, is started once by each process that needs it, and lives as long as the process
(`workbench/engines.py`). Tests keep apart by namespace: `namespace` is a fresh one for each.

The tests of a file stay in one process, and so do all that use one of `SHARED`.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from workbench.settings import READER, ROOT

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tests that look inside the engine's process send it a function (`collective_rpc`).
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

# A shell has what it starts in the background ignore Ctrl-C; the scripts that tests interrupt would, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_cores(worker: int, workers: int) -> list[int]:
    """The cores of a process of pytest-xdist."""
    cores = sorted(os.sched_getaffinity(0))
    step = min(workers, len(cores))
    return cores[worker % step :: step]


def threads(cores: list[int]) -> dict[str, str]:
    """How many threads PyTorch has outside of vLLM, and Numba for drafts made of n-grams.

    Threads of two processes that wait for each other's cores spin.
    """
    return dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(len(cores)))


if name := os.environ.get("PYTEST_XDIST_WORKER"):
    own = own_cores(int(name.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, own)))
    for variable, number in threads(own).items():
        os.environ.setdefault(variable, number)

# No test is about time: a busy machine fails none.
settings.register_profile("ours", deadline=None)
settings.load_profile("ours")

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from semkv_rag.engine import Engine
    from workbench.engines import Engines
    from workbench.server import Server

pytest_plugins = ["workbench.starts"]

FORKS = "fork_server"
"""The key under which the processes of pytest-xdist are given the fork server's address."""

SHARED = ("server", "taught", "tools", "llava")
"""Fixtures that start a process for several files: tests that use the same one run in one process."""

STARTS_ENGINES = {*SHARED, "engine", "engines"}
"""A test that uses one of these is marked `engine`; others that start one say so themselves."""

# What takes minutes begins first, so that all processes end at about the same time.
LONGEST = (
    "server",
    "tests/docs/test_blocks.py",
    "tests/connector/test_architectures.py",
    "tests/engine/test_isolation.py",
    "tests/connector/test_fake_device.py",
    "tests/connector/test_object_store.py",
    "tests/cli/test_engine_verbs.py",
    "tests/connector/test_layer_kinds.py",
    "tests/connector/test_drafts.py",
    "integrations/llama-index-llms-semkv/tests/test_applications.py",
    "integrations/langchain-semkv/tests/test_packaging.py",
    "tests/engine/test_fusion.py",
    "taught",
    "tests/connector/test_poison.py",
    "tests/store/test_frozen_index.py",
    "tests/connector/test_adapters.py",
    "integrations/langchain-semkv/tests/test_examples.py",
    "tests/connector/test_several_ranks.py",
    "tests/store/test_power_loss.py",
    "tests/cli/test_quality.py",
    "tests/store/test_disk_faults.py",
)

_counter = itertools.count()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One fork server for all processes of pytest-xdist: it takes 15 s of a core to import vLLM."""
    if "not engine" in node.config.option.markexpr:
        return
    from workbench import forkserver

    # Libraries look at these when they are loaded, and the fork server loads them.
    with pytest.MonkeyPatch.context() as patched:
        for variable, number in threads(own_cores(0, node.workerinput["workercount"])).items():
            patched.setenv(variable, os.environ.get(variable, number))
        node.workerinput[FORKS] = forkserver.share()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks each test with what it needs and with the process that it shares."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if STARTS_ENGINES & fixtures:
        item.add_marker(pytest.mark.engine)
    item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""
    gone = [group for group in LONGEST if group.endswith(".py") and not (ROOT / group).exists()]
    assert not gone, f"LONGEST names files that are not there: {gone}"
    place = {group: index for index, group in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(_group(item), len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests will start engines, these are forks of a process that imports vLLM meanwhile."""
    if session.config.option.collectonly:
        return
    if getattr(session.config.option, "loadgroup", False):  # in a worker of pytest-xdist
        grouped = all(item.nodeid.endswith(f"@{_group(item)}") for item in session.items)
        assert grouped, "pytest-xdist does not group tests: see requirements/cpu.in"
    if any(item.get_closest_marker("engine") for item in session.items):
        from workbench import forkserver, starts

        forkserver.install(getattr(session.config, "workerinput", {}).get(FORKS))
        starts.count_engines()


def _group(item: pytest.Item) -> str:
    fixtures = getattr(item, "fixturenames", ())
    shared = next((name for name in SHARED if name in fixtures), None)
    place = item.path.relative_to(ROOT)
    if place.parent == Path("tests/on_ray"):
        return "ray"  # two clusters at once would share the cores of one
    return shared or str(place)


@pytest.fixture(scope="session", autouse=True)
def selectors_of_our_own() -> None:
    """As a user would: before any engine starts."""
    from workbench.selectors import register

    register()


@pytest.fixture(scope="session")
def reader() -> Path:
    """The reader: a small model that was trained for the examples and tests."""
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
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The session's engines, by model and arguments."""
    from workbench.engines import Engines

    engines = Engines(tmp_path_factory.mktemp)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def engine(engines: Engines, reader: Path) -> Engine:
    """The reader in float32, with an empty store."""
    return engines.get(reader)


@pytest.fixture(scope="session")
def llava(engines: Engines, tiny_model: Callable[[str], Path]) -> Engine:
    """A tiny random model that takes images, with a tool parser."""
    return engines.get(
        tiny_model("llava"),
        chat_args={"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        model_impl="transformers",
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. Not for longer: the thread has its event loop meanwhile, and takes no other."""
    from workbench import browser

    if (program := browser.program()) is None:
        pytest.skip("no Chromium: docs/testing.md says how to get one")
    with browser.started(program) as started:
        yield started


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
