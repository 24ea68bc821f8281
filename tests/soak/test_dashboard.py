"""The dashboard and the alerts at a real Prometheus, over a real run in which all of it happens."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from workbench.chunks import random_tokens
from workbench.dashboard.load import STORED, Load
from workbench.dashboard.panels import Curve, Panel, curves, draw, filled, panels
from workbench.dashboard.prometheus import COMPOSE, Prometheus, QueryError
from workbench.server import Server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
SECONDS = 60
CHUNK_TOKENS = 90
LIMIT_BYTES = 6 << 20


def test_promtool_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool: apt install prometheus")
    rules = subprocess.run(
        [promtool, "check", "rules", COMPOSE / "alerts.yaml"], capture_output=True, text=True
    )
    assert rules.returncode == 0, rules.stderr
    assert "5 rules found" in rules.stdout
    Prometheus(tmp_path, "localhost:8000", "key")  # writes its configuration
    config = [promtool, "check", "config", tmp_path / "prometheus.yaml"]
    checked = subprocess.run(config, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@dataclass
class Run:
    """A server under load, as Prometheus saw it."""

    prometheus: Prometheus
    begin: float
    end: float


@pytest.fixture(scope="module")
def run(reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus: apt install prometheus")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reader)
    pieces = [random_tokens(9000 + number, CHUNK_TOKENS) for number in range(4 * STORED)]
    chunks = [tokenizer.decode(piece) for piece in pieces]
    with Server(reader, tmp_path_factory.mktemp("served")) as server:
        target = server.base_url.removeprefix("http://").removesuffix("/v1")
        folder = tmp_path_factory.mktemp("prometheus")
        with Prometheus(folder, target, server.operator_key) as prometheus:
            begin = time.time()
            Load(server, chunks, LIMIT_BYTES).run(SECONDS)
            yield Run(prometheus, begin, time.time())


@pytest.mark.engine
@pytest.mark.parametrize("panel", list(panels()), ids=lambda panel: panel.title)
def test_a_panel_shows_what_happens(run: Run, panel: Panel) -> None:
    for query, _ in panel.queries:
        alone = Panel(panel.title, panel.kind, panel.unit, panel.place, False, ((query, ""),))
        found = curves(alone, run.prometheus, run.begin, run.end)
        values = [one for curve in found for one in curve.values if math.isfinite(one)]
        assert any(value > 0 for value in values), query


@pytest.mark.engine
def test_a_wrong_query_would_be_seen(run: Run) -> None:
    with pytest.raises(QueryError, match="parse error"):
        run.prometheus.range("sum(rate(semkv_requests_total))[", run.begin, run.end, 1)
    assert run.prometheus.range(filled("semkv_nothing"), run.begin, run.end, 1) == []


@pytest.mark.engine
def test_the_variable_of_the_model(run: Run, reader: Path) -> None:
    assert run.prometheus.label_values("semkv_requests_total", "model_name") == [str(reader)]


@pytest.mark.engine
def test_no_alert_fails_and_none_is_raised(run: Run) -> None:
    rules = run.prometheus.rules()
    assert len(rules) == 5
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert {rule["state"] for rule in rules} <= {"inactive", "pending"}


def test_a_drawing(tmp_path: Path) -> None:
    shown = [(panel, [Curve("a", [0.0, 1.0], [math.nan, 2.0])]) for panel in panels()]
    draw(shown, 1.0, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 20_000
