"""A remembered fingerprint is that of the same files, arguments and environment, and of no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semkv_rag.known_fingerprints import KnownFingerprint, cache_folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_it_is_remembered(model: Path) -> None:
    assert KnownFingerprint(str(model), {"seed": 0}).get() is None
    KnownFingerprint(str(model), {"seed": 0}).remember("ab" * 32)
    KnownFingerprint(str(model), {"seed": 1}).remember("cd" * 32)
    assert KnownFingerprint(str(model), {"seed": 0}).get() == "ab" * 32
    KnownFingerprint(str(model), {"seed": 0}).remember("ef" * 32)
    assert KnownFingerprint(str(model), {"seed": 0}).get() == "ef" * 32
    assert KnownFingerprint(str(model), {}).get() is None


def test_what_changes_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KnownFingerprint(str(model), {}).remember("ab" * 32)
    weights = model / "model.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert KnownFingerprint(str(model), {}).get() is None
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert KnownFingerprint(str(model), {}).get() == "ab" * 32
    (model / "tokenizer.json").touch()
    assert KnownFingerprint(str(model), {}).get() is None
    (model / "tokenizer.json").unlink()
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    assert KnownFingerprint(str(model), {}).get() is None
    monkeypatch.delenv("VLLM_SOMETHING")
    monkeypatch.setattr("semkv_rag.known_fingerprints.version", lambda _: "another")
    assert KnownFingerprint(str(model), {}).get() is None


def test_a_hub_s_name_is_not_remembered(model: Path) -> None:
    KnownFingerprint("owner/name", {}).remember("ab" * 32)
    assert KnownFingerprint("owner/name", {}).get() is None


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_a_broken_file_is_as_none(model: Path, content: str) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "fingerprints.json").write_text(content)
    assert KnownFingerprint(str(model), {}).get() is None
    KnownFingerprint(str(model), {}).remember("ab" * 32)
    assert KnownFingerprint(str(model), {}).get() == "ab" * 32
