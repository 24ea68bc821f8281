"""A second engine on a machine without a GPU gets cores of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from semkv_rag.connector import cores
from semkv_rag.connector.cores import (
    BINDING,
    FEW_SPINS,
    SPINS,
    WAITING,
    cores_of_its_own,
    taken_cores,
    thread_settings,
)

WORKER = """
import os, sys, time
open("/proc/self/comm", "w").write(sys.argv[1])
os.sched_setaffinity(0, {int(core) for core in sys.argv[2].split(",")})
print("ready", flush=True)
time.sleep(60)
"""


class Workers:
    """Processes that are called as vLLM's and are bound as they are."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, *bound: int) -> None:
        command = [sys.executable, "-c", WORKER, name, ",".join(map(str, bound))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None and process.stdout.readline()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.end()


@pytest.fixture
def here() -> list[int]:
    """The cores of this process; two at least."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one core cannot be shared out")
    return allowed


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own processes are told their cores."""
    for name in (BINDING, SPINS, WAITING):
        monkeypatch.delenv(name, raising=False)


def test_bound_workers_are_seen(workers: Workers, here: list[int]) -> None:
    workers.start("VLLM::Worker", here[-1])
    workers.start("another", here[0])
    workers.start("VLLM::EngineCor", *here)  # bound to none
    assert here[-1] in taken_cores()


def test_without_another_engine_all_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "taken_cores", set)
    with cores_of_its_own(1):
        assert BINDING not in os.environ


def test_a_second_engine_gets_the_other_cores(
    monkeypatch: pytest.MonkeyPatch, here: list[int]
) -> None:
    monkeypatch.setattr(cores, "taken_cores", lambda: {here[-1]})
    with cores_of_its_own(1):
        assert os.environ[BINDING] == ",".join(map(str, here[:-1]))
    assert BINDING not in os.environ


def test_without_a_free_core_threads_are_bound_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "taken_cores", lambda: os.sched_getaffinity(0))
    with cores_of_its_own(1):
        assert os.environ[BINDING] == "nobind"


@pytest.mark.parametrize(("binding", "ranks"), [("0", 1), ("nobind", 1), (None, 2)])
def test_what_the_user_chose_stays(
    monkeypatch: pytest.MonkeyPatch, binding: str | None, ranks: int
) -> None:
    monkeypatch.setattr(cores, "taken_cores", lambda: {0})
    if binding is not None:
        monkeypatch.setenv(BINDING, binding)
    with cores_of_its_own(ranks):
        assert os.environ.get(BINDING) == binding


@pytest.mark.parametrize(
    ("allowed", "taken", "ranks", "short"),
    [
        ({0, 1}, set(), 1, True),
        ({0, 1, 2}, set(), 1, False),
        ({0, 1, 2, 3}, set(), 2, True),
        ({0, 1, 2, 3}, {0, 1}, 1, True),
        ({0, 1, 2, 3}, {4, 5}, 1, False),
    ],
)
def test_threads_with_all_cores_soon_sleep(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], taken: set[int], ranks: int, short: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(cores, "taken_cores", lambda: taken)
    with cores_of_its_own(ranks):
        assert os.environ.get(SPINS) == (str(FEW_SPINS) if short else None)
    assert SPINS not in os.environ


@pytest.mark.parametrize(("name", "value"), [(SPINS, "300000"), (WAITING, "active")])
def test_how_long_the_user_lets_threads_wait_stays(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv(name, value)
    with cores_of_its_own(1):
        assert os.environ[name] == value
        assert {SPINS, WAITING} & os.environ.keys() == {name}


def test_processes_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([os.sched_getaffinity(0)])
    monkeypatch.setattr(cores, "taken_cores", lambda: next(looks))
    assert thread_settings(1) == {BINDING: "nobind", SPINS: str(FEW_SPINS)}


def test_where_a_process_has_no_cores_all_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert thread_settings(1) == {}
