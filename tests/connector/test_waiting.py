"""How vLLM's processes wait for each other's messages on a CPU."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from semkv_rag.connector import executor_class
from semkv_rag.connector.executor_class import SPIN_S, WANTED_S, BriefSpin
from semkv_rag.engine.launch import EXECUTOR
from workbench.engines import Engines
from workbench.forkserver import SPINS
from workbench.inside import inside, process_of
from workbench.starts import run_program

IDLE_USES_S = 0.4
"""Of a second. As vLLM has it, a worker that has just answered spins for all of it."""


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> tuple[MessageQueue, MessageQueue]:
    """A writer's and a reader's end."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", BriefSpin)
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    greeting = threading.Thread(target=writer.wait_until_ready)
    greeting.start()
    reader.wait_until_ready()
    greeting.join()
    return writer, reader


def test_a_message_wakes_who_sleeps(queue: tuple[MessageQueue, MessageQueue]) -> None:
    writer, reader = queue
    for number in range(50):
        threading.Timer(2 * SPIN_S, writer.enqueue, [number]).start()
        assert reader.dequeue(timeout=10) == number


def test_a_message_is_found_whose_wake_up_was_lost(
    queue: tuple[MessageQueue, MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = queue
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    for wait_s in (2 * SPIN_S, 1.5):  # behind a message, and idle
        threading.Timer(wait_s, writer.enqueue, ["told"]).start()
        assert reader.dequeue(timeout=10) == "told"


def test_a_spin_ends_when_others_want_the_core(
    queue: tuple[MessageQueue, MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = queue
    monkeypatch.setattr(shm_broadcast, "sched_yield", partial(time.sleep, 2 * WANTED_S))
    waiting = reader._spin_condition
    waiting.record_read()
    assert waiting.busy_loop_s == SPIN_S
    waiting.wait(1)
    assert waiting.busy_loop_s == 0
    writer.enqueue("told")
    assert reader.dequeue(timeout=10) == "told"
    assert waiting.busy_loop_s == SPIN_S  # the next wait begins with a spin


@pytest.mark.engine
def test_an_engine_that_has_answered_leaves_the_cores_to_others(
    engines: Engines, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SPINS, "1")
    with engines.own(reader) as engine:
        assert engine._llm is not None
        parallel = engine._llm.vllm_config.parallel_config
        assert parallel.distributed_executor_backend == EXECUTOR  # which waits for the workers
        assert inside(engine, lambda worker: executor_class.SPIN_S) == SPIN_S > 0
        engine.generate("who leads ?", sampling={"max_tokens": 4})
        process = process_of(engine)
        processes = [process, *process.children(recursive=True)]
        before = used_s(processes)
        time.sleep(1)
        assert used_s(processes) - before < IDLE_USES_S


def used_s(processes: list[psutil.Process]) -> float:
    """The CPU time that they have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


SCRIPT = """
import sys, time
import psutil
from semkv_rag import Engine

def used_s(processes):
    return sum(sum(process.cpu_times()[:2]) for process in processes)

if __name__ == "__main__":
    model, store = sys.argv[1:]
    with Engine(model, store=store, max_model_len=256, kv_cache_memory_bytes=1 << 26) as engine:
        engine.generate("who leads ?", sampling={"max_tokens": 4})
        processes = psutil.Process().children(recursive=True)
        before = used_s(processes)
        time.sleep(1)
        executor = engine._llm.vllm_config.parallel_config.distributed_executor_backend
        print(executor, len(processes), used_s(processes) - before)
"""


@pytest.mark.soak
@pytest.mark.engine
def test_so_does_one_whose_processes_are_spawned(reader: Path, tmp_path: Path) -> None:
    """As a user starts it: its worker inherits nothing, and must make its queues brief itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_program(sys.executable, script, reader, tmp_path / "kv")
    assert done.returncode == 0, done.stderr
    executor, processes, used_s = done.stdout.splitlines()[-1].split()
    assert executor == EXECUTOR
    assert int(processes) >= 2
    assert float(used_s) < IDLE_USES_S
