"""vLLM's engine processes as forks of a process that has imported vLLM already.

vLLM spawns its engine process on a CPU, and that one its worker: each imports vLLM anew, which takes ten
seconds of a core; a fork takes milliseconds. What runs in them, and the messages between them, stay as
they are: only where a process comes from differs. Programs that tests run as users do (`semkv`,
examples, scripts) are not touched and spawn.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeVar

T = TypeVar("T")

PRELOAD = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.transformers",
    "vllm.distributed.kv_transfer",
    "semkv_rag.connector.executor_class",
    "semkv_rag.connector.worker_class",
    "semkv_rag.connector.connector",
    "semkv_rag.connector.images.connector",
    "workbench.preloaded",
]

SPINS = "SEMKV_TESTS_SPIN"
"""Set when an engine is started: its processes wait for messages as a user's do."""

BEHIND_TESTS = 5
"""The niceness of engines. A test's own process has waits that end after two seconds, and many engines on
two cores can keep it from running for that long."""


class _Descriptor:
    """A file descriptor that reaches the new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], _Descriptor], tuple[Any]]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> _Descriptor:
    return _Descriptor(sent.detach())


class _Process(ForkServerProcess):
    """A process with the environment and the outputs that its parent has when it starts it.

    A fork has those of the fork server, which began before.
    """

    def start(self) -> None:
        self._environment = dict(os.environ)
        self._outputs = [_Descriptor(1), _Descriptor(2)]
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        # The engine process forks its worker, as vLLM does by default on a GPU.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if SPINS not in os.environ:
            _wait_without_spinning()
        os.nice(BEHIND_TESTS)
        for target, given in enumerate(self._outputs, start=1):
            os.dup2(given.number, target)
            os.close(given.number)
        super().run()


def _wait_without_spinning() -> None:
    """Have vLLM's processes sleep at once while they wait: here engines share two cores."""
    from semkv_rag.connector import executor_class

    executor_class.SPIN_S = 0.0
    executor_class.spin_briefly()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def preload() -> None:
    """Start the fork server; it imports vLLM while this process goes on."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def install(address: str | None = None) -> None:
    """Have vLLM take the engine processes of this process from the fork server.

    Args:
        address: of the server that another process shares; if left out, this process starts its own.
    """
    from vllm.v1.engine import utils

    if address:
        _join(address)
    else:
        preload()
    utils.get_mp_context = _Context


def share() -> str:
    """Start a fork server that others can use until this process ends: its address, for `install`."""
    preload()
    address: str = forkserver._forkserver._forkserver_address
    return address


def _join(address: str) -> None:
    """Have `multiprocessing` of this process ask the fork server at `address`."""
    server = forkserver._forkserver
    server._forkserver_address = address
    # A client sends each fork a descriptor that keeps the server up. Any will do here: the process that
    # started this server has the one that counts.
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running


def call(function: Callable[..., T], *arguments: Any) -> T:
    """What a module's function returns in a process of its own, which has imported vLLM.

    Raises:
        EOFError: the process ended without an answer; it has printed why.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = _Process(target=_answer, args=(sender, function, *arguments))
    process.start()
    sender.close()
    try:
        answer: T = receiver.recv()
    finally:
        process.join()
    return answer


def _answer(sender: Connection, function: Callable[..., T], *arguments: Any) -> None:
    sender.send(function(*arguments))
