"""`semkv recode`: what it says, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.cli.conftest import Semkv
from tests.store import made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two documents, of two namespaces."""
    with KVStore(tmp_path / "store") as store:
        for name, namespace, seeds in (("a", "default", (1, 2)), ("b", "other", (3,))):
            ids = [made.put(store, seed, namespace=namespace) for seed in seeds]
            store.put_source(made.MODEL, namespace, name, "digest", ids)
    return tmp_path / "store"


def codecs(root: Path) -> list[str]:
    with KVStore(root) as store:
        assert store.verify().notices == ()
        return [record.codec for record in store.chunks()]


def test_it_says_what_it_did(semkv: Semkv, root: Path) -> None:
    before = codecs(root)
    planned = semkv("recode", "--store", root, "--codec", "int8", "--dry-run")
    assert planned.code == 0 and f"{len(before)} chunks to recode" in planned.out
    assert codecs(root) == before
    some = semkv("recode", "--store", root, "--codec", "int8", "--namespace", "other", "--json")
    assert some.data["recoded"] < len(before)
    with KVStore(root) as store:
        kept = sum(record.bytes for record in store.chunks(namespace="other"))
    assert some.data["bytes_after"] == kept
    rest = semkv("recode", "--store", root, "--codec", "int8")
    assert f"{some.data['recoded']} were int8" in rest.out
    assert codecs(root) == ["int8"] * len(before)
    listed = semkv("ls", "--chunks", "--store", root)
    assert listed.out.count(" int8 ") == len(before)


def test_what_it_refuses(semkv: Semkv, root: Path) -> None:
    unknown = semkv("recode", "--store", root, "--codec", "int3")
    assert unknown.code == 2 and "use one of plain, fp8, int8, k8v4, int4" in unknown.err
    other = semkv("recode", "--store", root, "--codec", "int8", "--model", "ffff")
    assert other.code == 2 and "0 models of the store begin so" in other.err
    assert semkv("recode", "--store", root, "--codec", "fp8").code == 0
    back = semkv("recode", "--store", root, "--codec", "plain")
    assert back.code == 1 and "precompute them again" in back.err


def test_a_model_by_the_beginning_of_its_fingerprint(semkv: Semkv, root: Path) -> None:
    with KVStore(root) as store:
        model = next(store.chunks()).model
    outcome = semkv("recode", "--store", root, "--codec", "int4", "--model", model[:16], "--json")
    assert outcome.code == 0 and outcome.data["recoded"] > 0


def test_damaged_chunks_are_named(semkv: Semkv, root: Path) -> None:
    with KVStore(root) as store:
        record = next(store.chunks())
        store.path(record.model, record.namespace, record.id).write_bytes(b"torn")
    outcome = semkv("recode", "--store", root, "--codec", "int8")
    assert outcome.code == 1
    assert record.id[:16] in outcome.err and "semkv verify --repair" in outcome.err


@pytest.mark.slow
def test_killed_it_goes_on(tmp_path: Path) -> None:
    count = 150  # enough for a starved reader to see some done and some not
    with KVStore(tmp_path) as store:
        for seed in range(count):
            made.put(store, seed)
    command = [sys.executable, "-m", "semkv_rag.cli", "recode", "--store", str(tmp_path)]
    command += ["--codec", "int8"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while running.poll() is None:
            with KVStore(tmp_path, read_only=True) as store:
                done = sum(record.codec == "int8" for record in store.chunks())
            if done >= 3:
                os.kill(running.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
    finally:
        running.kill()
        running.wait()
    with KVStore(tmp_path) as store:
        left = sum(record.codec == "plain" for record in store.chunks())
    assert 0 < left < count
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert codecs(tmp_path) == ["int8"] * count
