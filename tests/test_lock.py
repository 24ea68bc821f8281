"""The pinned set: versions from the registry, all that is needed, and what is installed here."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from workbench.settings import ROOT

LOCK = ROOT / "requirements" / "cpu.lock"
NOT_HERE = {"gpu"}
"""Extras that the pinned set is not for."""


def lines(file: Path) -> list[str]:
    """A file of requirements, without its comments."""
    stripped = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def named(requirements: list[str]) -> dict[NormalizedName, Requirement]:
    parsed = [Requirement(line) for line in requirements]
    return {canonicalize_name(one.name): one for one in parsed}


def projects() -> dict[NormalizedName, Mapping[str, Any]]:
    """What our packages say of themselves, by name."""
    files = [ROOT / "pyproject.toml", *(ROOT / "integrations").glob("*/pyproject.toml")]
    said = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    return {canonicalize_name(one["project"]["name"]): one for one in said}


def asked_for() -> Iterator[str]:
    """What our packages and their tools want."""
    yield from lines(ROOT / "requirements" / "cpu.in")
    for said in projects().values():
        yield from said["build-system"]["requires"]
        yield from said["project"]["dependencies"]
        for extra, wanted in said["project"].get("optional-dependencies", {}).items():
            if extra not in NOT_HERE:
                yield from wanted


def needed() -> Iterator[tuple[str, Requirement]]:
    """All that is asked for, and what the installed packages ask for in turn, with who asks."""
    overridden = named(lines(ROOT / "requirements" / "overrides.txt"))
    ours = projects().keys()
    todo = [("we", Requirement(line)) for line in asked_for()]
    seen: set[tuple[NormalizedName, str]] = set()
    while todo:
        who, wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        wanted = overridden.get(name, wanted)
        if name in ours or (wanted.marker is not None and not wanted.marker.evaluate()):
            continue
        yield who, wanted
        for extra in {"", *wanted.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo.extend((name, one) for one in _requirements(name, extra))


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    """What an installed package asks for on this machine, with an extra of its."""
    for line in importlib.metadata.requires(name) or []:
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            one.marker = None
            yield one


def test_every_line_of_the_lock_is_one_version_from_the_registry() -> None:
    wrong = []
    for line in lines(LOCK):
        try:
            name, version = line.split("==")
            right = line == f"{canonicalize_name(name)}=={version}" and "*" not in version
            right = right and str(Requirement(line)) == line  # no address, marker or extra
        except (ValueError, InvalidRequirement):
            right = False
        if not right:
            wrong.append(line)
    assert not wrong
    assert len(named(lines(LOCK))) == len(lines(LOCK))


def test_the_lock_holds_what_is_needed_and_nothing_else() -> None:
    names = {canonicalize_name(wanted.name) for _, wanted in needed()}
    locked = named(lines(LOCK)).keys()
    assert names - locked == set()
    assert locked - names == set()


def test_the_versions_of_the_lock_satisfy_each_other() -> None:
    """As `pip check` would say, but for what requirements/overrides.txt decides."""
    locked = named(lines(LOCK))
    wrong = [
        f"{who} wants {wanted}, the lock has {locked.get(canonicalize_name(wanted.name))}"
        for who, wanted in needed()
        # Installed, as vLLM asks for a CPU build of torch, of which the lock leaves the build out.
        if not wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    ]
    assert not wrong


def test_the_tests_run_with_the_versions_of_the_lock() -> None:
    other = {
        name: found
        for name, wanted in named(lines(LOCK)).items()
        for found in [importlib.metadata.version(name)]
        if not wanted.specifier.contains(found, prereleases=True)
    }
    assert not other, "make setup installs what the lock says"


def test_nothing_is_asked_for_by_address() -> None:
    files = [ROOT / "requirements" / name for name in ("cpu.in", "overrides.txt")]
    asked = [*asked_for(), *(line for file in files for line in lines(file))]
    assert asked
    assert not [line for line in asked if Requirement(line).url]
