"""The files of `deploy/`: they name only what there is, and what has to be set is said."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from vllm.v1.metrics import loggers

from semkv_rag.cli import app
from semkv_rag.connector.metrics import SECONDS, ReuseMetrics
from semkv_rag.engine.gauges import TEXTS
from workbench.settings import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
HELM = DEPLOY / "helm" / "semkv"
OF_VLLM = {"--host", "--port"}
METRIC = re.compile(r"\b(?:semkv_|vllm:)[a-z_:]+")


def metrics() -> set[str]:
    """All that `/metrics` has."""
    ours = {f"{name}_total" for name in ReuseMetrics.COUNTERS}
    times = {name for name, _ in SECONDS.values()}
    theirs = set(re.findall(r'name="(vllm:[a-z_]+)"', inspect.getsource(loggers)))
    parts = {f"{name}_{part}" for name in times | theirs for part in ("bucket", "sum", "count")}
    return ours | set(TEXTS) | times | theirs | parts


def named_in(text: str) -> set[str]:
    return set(METRIC.findall(text))


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((COMPOSE / "grafana" / "semkv.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 10
    shown = named_in(json.dumps(dashboard))
    assert len(shown) > 8
    assert shown <= metrics()
    places = {
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    area = sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in dashboard["panels"])
    assert len(places) == area, "no panel lies over another"
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert all(target["expr"] for target in panel["targets"])


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    shown = named_in((COMPOSE / "grafana" / "semkv.json").read_text())
    ours = {f"{name}_total" for name in ReuseMetrics.COUNTERS}
    ours |= {f"{name}_bucket" for name, _ in SECONDS.values()}
    assert ours | set(TEXTS) <= shown


def test_alerts_are_about_metrics_that_there_are_and_say_what_to_do() -> None:
    rules = yaml.safe_load((COMPOSE / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert len(rules) >= 4
    for rule in rules:
        assert named_in(rule["expr"]) <= metrics()
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return loaded


def options() -> set[str]:
    """Of `semkv serve`."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts}


def test_the_servers_of_compose_and_helm_have_options_that_there_are() -> None:
    chart = (HELM / "templates" / "deployment.yaml").read_text()
    commands = [*compose()["services"]["semkv"]["command"], *re.findall(r'"(--[^"]+)"', chart)]
    used = {word.partition("=")[0] for word in commands if word.startswith("--")}
    assert len(used) > 5
    assert used <= options() | OF_VLLM


def test_all_that_compose_wants_is_in_an_example() -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    wanted = set(re.findall(r"\$\{([A-Z_0-9]+)", text))
    example = (COMPOSE / ".env.example").read_text()
    assert wanted == {line.partition("=")[0] for line in example.splitlines()}
    mounted = re.findall(r"\./([\w./-]+)", text)
    assert len(mounted) > 5
    written = {"operator.key", "keys.json", "s3.json"}  # with secrets: docs/deploy.md has how
    guide = (ROOT / "docs" / "deploy.md").read_text()
    for name in set(mounted):
        assert (COMPOSE / name).exists() or (name in written and name in guide), name
    for name in written:
        assert not (COMPOSE / name).exists()


def test_compose_names_its_volumes_secrets_and_services() -> None:
    told = compose()
    for name, service in told["services"].items():
        assert "image" in service, name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith("./") or source in told["volumes"], (name, volume)
        assert set(service.get("secrets", ())) <= told["secrets"].keys()
        assert set(service.get("depends_on", ())) <= told["services"].keys()


def test_the_chart_uses_the_values_that_it_has() -> None:
    values = yaml.safe_load((HELM / "values.yaml").read_text())
    used = {
        tuple(path.split("."))
        for template in (HELM / "templates").glob("*.yaml")
        for path in re.findall(r"\.Values\.([\w.]+)", template.read_text())
    }
    for path in used:
        place: Any = values
        for step in path:
            assert step in place, path
            place = place[step]
    assert {path[0] for path in used} == set(values), "no value is without use"


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").iterdir()), ids=lambda path: path.name)
def test_images_are_not_root_s(path: Path) -> None:
    lines = path.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "10001", "a number, which Kubernetes can tell from root"
    after = lines[lines.index("USER 10001") :]
    assert not [line for line in after if line.startswith(("RUN", "COPY"))]
    assert lines[-1] == 'ENTRYPOINT ["semkv", "serve"]'
    copied = [line.split()[1] for line in lines if line.startswith("COPY ")]
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").iterdir()), ids=lambda path: path.name)
def test_hadolint_has_nothing_against_an_image(path: Path, tmp_path: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"

    def checked(file: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, "--no-color", file], capture_output=True, text=True)

    found = checked(path)
    assert (found.returncode, found.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text(path.read_text().replace("USER 10001", "USER root"))
    assert "DL3002" in checked(worse).stdout


def test_the_service_s_options_are_there() -> None:
    text = (DEPLOY / "systemd" / "semkv.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    assert {word for word in command.split() if word.startswith("--")} <= options()
