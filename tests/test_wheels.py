"""The packages as they are released: built, installed apart from this environment's own, and used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from workbench.release import INTEGRATIONS, LOCK, build, write_sbom
from workbench.settings import ROOT

pytestmark = pytest.mark.slow

USED = """
import sys
from pathlib import Path

import semkv_rag
from semkv_rag.store import KVStore
from semkv_rag.token_map import TokenMap
from semkv_rag import ReuseReport
import langchain_semkv, llama_index.llms.semkv

for module in (semkv_rag, langchain_semkv, llama_index.llms.semkv):
    assert Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
with KVStore(sys.argv[2]) as store:  # the migrations are there
    assert store.verify().ok
assert "<style>" in ReuseReport(token_map=TokenMap(("a",))).to_html()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the package's name."""
    folder = tmp_path_factory.mktemp("wheels")
    return {path.name.partition("-")[0].replace("_", "-"): path for path in build(folder)}


def test_a_wheel_has_all_that_it_needs_and_nothing_else(wheels: dict[str, Path]) -> None:
    names = zipfile.ZipFile(wheels["semkv-rag"]).namelist()
    for needed in (
        "semkv_rag/py.typed",
        "semkv_rag/server/console.html",
        "semkv_rag/token_map/style.css",
        "semkv_rag/store/migrations/versions/0001_first.py",
    ):
        assert needed in names
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"semkv_rag"}
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


def test_they_need_each_other_s_version(wheels: dict[str, Path]) -> None:
    told = {}
    for name, path in wheels.items():
        with zipfile.ZipFile(path) as archive:
            (metadata,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
            told[name] = Parser().parsestr(archive.read(metadata).decode())
    versions = {name: message["Version"] for name, message in told.items()}
    assert len(set(versions.values())) == 1, versions
    for name in INTEGRATIONS:
        needs = told[name].get_all("Requires-Dist", [])
        assert told[name]["License-Expression"] or told[name]["License"]
        (wanted,) = (Requirement(one) for one in needs if one.startswith("semkv-rag"))
        assert wanted.specifier.contains(versions["semkv-rag"]), "also where nothing is tagged"
    extras = set(told["semkv-rag"].get_all("Provides-Extra", []))
    assert {"cpu", "gpu", "object-storage", "postgresql", "prompt-cache", "ray"} <= extras


def test_they_work_where_the_sources_are_not(wheels: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    installed = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
            *("--target", str(folder), *map(str, wheels.values())),
        ],
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    # -P and another folder: nothing of the checkout is found; the dependencies are this environment's.
    command = [sys.executable, "-P", "-c", USED, str(folder), str(tmp_path / "store")]
    used = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(folder)}
    )
    assert used.returncode == 0, used.stderr


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages in a repository of their own, with one commit."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("semkv_rag", "integrations"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)  # noqa: S607


def versions(folder: Path) -> set[str]:
    """What each package of a tree is built as."""
    found = set()
    for place in (folder, *(folder / "integrations" / name for name in INTEGRATIONS)):
        told = subprocess.run(
            [sys.executable, "-m", "hatchling", "version"],
            cwd=place,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(told.stdout.strip())
    return found


def test_a_tag_is_the_version_of_all(repository: Path) -> None:
    (untagged,) = versions(repository)
    assert untagged.startswith("0.1.0.dev")
    git(repository, "tag", "v0.7.0")
    assert versions(repository) == {"0.7.0"}
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "second")
    (behind,) = versions(repository)
    assert behind.startswith("0.7.1.dev1+g")


def test_sources_without_a_repository_have_their_version(repository: Path, tmp_path: Path) -> None:
    git(repository, "tag", "v0.8.0")
    place = repository / "integrations" / "langchain-semkv"
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*command, place], check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    assert packed.name == "langchain_semkv-0.8.0.tar.gz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*command, tmp_path / "langchain_semkv-0.8.0"], check=True, capture_output=True)
    assert [one.name for one in tmp_path.glob("*.whl")] == [
        "langchain_semkv-0.8.0-py3-none-any.whl"
    ]
    shutil.copytree(repository, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    assert versions(tmp_path / "copy") == {"0.1.0.dev0"}


@pytest.mark.soak
def test_the_sbom_names_each_package_that_is_pinned(tmp_path: Path) -> None:
    told = json.loads(
        write_sbom(tmp_path).read_text()
    )  # which it checks against CycloneDX's schema
    assert told["bomFormat"] == "CycloneDX"
    assert told["metadata"]["component"]["name"] == "semkv-rag"
    named = {f"{one['name']}=={one['version']}" for one in told["components"]}
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    assert named == {line for line in lines if line and not line.startswith("#")}
    assert len(named) > 300
    assert all(one["purl"].startswith("pkg:pypi/") for one in told["components"])


@pytest.mark.soak
def test_an_sbom_that_cannot_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.release.LOCK", tmp_path / "nothing.lock")
    with pytest.raises(RuntimeError, match=r"nothing\.lock"):
        write_sbom(tmp_path)
