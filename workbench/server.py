"""`semkv serve` in a process of its own, for tests that speak HTTP with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import httpx
import psutil

from workbench.settings import ROOT
from workbench.starts import SERVER, record

START_SECONDS = 240
END_SECONDS = 90


class Server:
    """Started on entering, ended on leaving.

    Args:
        extra: further options of `semkv serve`.
        store_options: where its store is, as options; a folder of its own unless given.
        forked: its engine's processes are forks (`workbench/serve_forked.py`); else as a user's are.

    Attributes:
        base_url: for OpenAI clients.
        store: the folder of its store.
        model: the name that requests use.
        api_key: of the namespace `default`; `tenant_key` of the namespace `tenant`; `operator_key` for
            what concerns all.
        captures_beyond: prompts of more tokens are stored by the tiers.
        further: a thousand tenants more, their namespaces by key.
    """

    api_key = "key-of-default"
    tenant_key = "key-of-tenant"
    operator_key = "key-of-the-operator"
    captures_beyond = 600
    further: ClassVar = {f"key-of-tenant-{n}": f"tenant-{n}" for n in range(1000)}

    def __init__(
        self,
        model: Path,
        folder: Path,
        extra: Sequence[str] = (),
        *,
        store_options: Sequence[str] | None = None,
        forked: bool = True,
    ) -> None:
        self.model = str(model)
        self.store = folder / "store"
        self._log = folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self._port}/v1"
        keys = folder / "keys.json"
        namespaces = {self.api_key: "default", self.tenant_key: "tenant", **self.further}
        keys.write_text(json.dumps(namespaces))
        operator = folder / "operator.key"
        operator.write_text(self.operator_key + "\n")
        self._command = [
            *(sys.executable, "-m", "workbench.serve_forked" if forked else "semkv_rag.cli"),
            *("serve", self.model),
            *(store_options or ("--store", str(self.store))),
            *("--api-key-namespaces", str(keys)),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--max-model-len", "1024"),
            *("--kv-cache-memory-bytes", str(256 << 20), "--block-size", "32", "--seed", "0"),
            *(
                "--prompt-cache",
                json.dumps({"capture_longer_than": self.captures_beyond, "threshold": 0.999}),
            ),
            *("--operator-key", str(operator)),
            *extra,
        ]

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        self._output = self._log.open("wb")
        self._process = subprocess.Popen(
            self._command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
            start_new_session=True,
            cwd=ROOT,  # where `workbench` is found
        )
        began = time.monotonic()
        try:
            self._wait()
            record(SERVER, began)
        except BaseException:
            self._end()
            raise
        return self

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        health = self.base_url.removesuffix("/v1") + "/health"
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(health, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-4000:]}")

    def _end(self) -> list[int]:
        """Tell it to end, as an init system does; the processes that had to be killed."""
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            family = [first, *first.children(recursive=True)]
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        _, alive = psutil.wait_procs(family, timeout=10)
        if alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()
        return [process.pid for process in alive]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        alive = self._end()
        assert error is not None or not alive, "the server left processes behind"
