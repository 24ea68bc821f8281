"""Prometheus in a process of its own, with the configuration of `deploy/compose`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from semkv_rag.closing import Closing
from workbench.settings import ROOT

COMPOSE = ROOT / "deploy" / "compose"
START_SECONDS = 60
SCRAPE_S = 1


@dataclass(frozen=True)
class Series:
    """One line of a query's answer.

    Attributes:
        times: in seconds since the epoch.
        values: NaN where a quantile of nothing was asked for.
    """

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class QueryError(Exception):
    """What Prometheus has against a query."""


class Prometheus(Closing):
    """Started on entering, ended on leaving.

    Args:
        folder: for its data and configuration.
        target: `host:port` of the server that it asks.
        key: the operator's.
    """

    def __init__(self, folder: Path, target: str, key: str) -> None:
        self._folder = folder
        (folder / "operator.key").write_text(key)
        told = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
        told["global"]["scrape_interval"] = f"{SCRAPE_S}s"
        told["rule_files"] = [str(COMPOSE / name) for name in told["rule_files"]]
        (job,) = told["scrape_configs"]
        job["authorization"]["credentials_file"] = str(folder / "operator.key")
        job["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(told))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"127.0.0.1:{port}"

    def __enter__(self) -> Self:
        program = shutil.which("prometheus")
        assert program is not None, "apt install prometheus"
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={self._folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"http://{self._address}/-/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        self.close()
        raise RuntimeError((self._folder / "log").read_text()[-2000:])

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def range(self, query: str, begin: float, end: float, step: float) -> list[Series]:
        """A query's values from `begin` to `end`, every `step` seconds.

        Raises:
            QueryError: it is no PromQL.
        """
        parameters = {"query": query, "start": begin, "end": end, "step": step}
        return [
            Series(
                one["metric"], [at for at, _ in one["values"]], [float(v) for _, v in one["values"]]
            )
            for one in self._asked("query_range", parameters)["result"]
        ]

    def label_values(self, metric: str, label: str) -> list[str]:
        """As a variable of a dashboard asks for them."""
        found: list[str] = self._asked(f"label/{label}/values", {"match[]": metric})
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The alerts' rules, with what became of each when it was evaluated last."""
        return [rule for group in self._asked("rules", {})["groups"] for rule in group["rules"]]

    def _asked(self, path: str, parameters: dict[str, Any]) -> Any:
        answer = httpx.get(f"http://{self._address}/api/v1/{path}", params=parameters, timeout=60)
        told = answer.json()
        if told["status"] != "success":
            raise QueryError(f"{parameters}: {told['error']}")
        return told["data"]
