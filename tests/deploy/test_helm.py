"""The chart, by Helm itself and by Kubernetes' schemas; see `requirements/deploy.txt`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import yaml

from workbench.settings import ROOT

CHART = ROOT / "deploy" / "helm" / "semkv"
TOOLS = ROOT / "build" / "deploy"
KUBERNETES = ("1.30", "1.34")
"""Versions that people run: what both know is what the chart may use."""
ALL_OF_IT = {
    "serviceMonitor": True,
    "modelsClaim": "models",
    "extraArgs": ["--max-model-len=8192"],
    "nodeSelector": {"disk": "nvme"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def helm() -> Iterator[ModuleType]:
    """Helm's own Go code, behind Python."""
    yield from tool("helm_python")


@pytest.fixture(scope="module")
def schemas() -> Iterator[ModuleType]:
    yield from tool("kubernetes_validate")


def tool(name: str) -> Iterator[ModuleType]:
    if not (TOOLS / ".ready").exists():
        pytest.skip("make build/deploy/.ready fetches Helm")
    sys.path.append(str(TOOLS))
    yield import_module(name)
    sys.path.remove(str(TOOLS))


def rendered(helm: ModuleType, values: dict[str, Any]) -> list[dict[str, Any]]:
    files = helm.Chart.load(str(CHART)).render(values, name="release")
    return [one for text in files.values() for one in yaml.safe_load_all(text) if one]


@pytest.mark.parametrize("values", [{}, ALL_OF_IT], ids=["defaults", "all of it"])
def test_helm_finds_nothing(helm: ModuleType, values: dict[str, Any]) -> None:
    found = helm.lint(str(CHART), values, strict=True)
    assert found["total_charts_linted"] == 1
    assert found["errors"] == []
    assert {one["error"] for one in found["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [{}, ALL_OF_IT], ids=["defaults", "all of it"])
def test_kubernetes_knows_each_field(
    helm: ModuleType, schemas: ModuleType, values: dict[str, Any], version: str
) -> None:
    resources = {one["kind"]: one for one in rendered(helm, values)}
    monitor = resources.pop(
        "ServiceMonitor", None
    )  # the Prometheus operator's, not Kubernetes' own
    assert (monitor is not None) == bool(values)
    assert resources.keys() == {"Deployment", "Service"}
    for resource in resources.values():
        schemas.validate(resource, version, strict=True)


def test_a_field_that_there_is_not_is_found(helm: ModuleType, schemas: ModuleType) -> None:
    (deployment,) = (one for one in rendered(helm, {}) if one["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["comand"] = ["semkv"]
    with pytest.raises(schemas.ValidationError, match="comand"):
        schemas.validate(deployment, KUBERNETES[-1], strict=True)


def test_a_chart_that_does_not_render_is_found(helm: ModuleType) -> None:
    with pytest.raises(helm.HelmError):
        rendered(helm, {"resources": "none"} | {"extraArgs": {"not": "a list"}, "image": None})
