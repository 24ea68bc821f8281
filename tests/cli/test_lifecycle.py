"""`semkv limit`, `pin`, `unpin` and `gc`, and what `rm` removes by model."""

from pathlib import Path

import pytest

from semkv_rag.store import KVStore, Limit, Pin
from tests.cli.conftest import Semkv
from tests.corpus.made_up_engine import FINGERPRINT
from tests.store import made

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all
OTHER = made.MODEL
"""The fingerprint of a second model."""


@pytest.fixture
def two_models(root: Path) -> Path:
    """The store, with a document of another model in it."""
    with KVStore(root) as store:
        store.add_model(OTHER, {"model": "older"})
        store.put_source(OTHER, "default", "docs/a.txt", "1", [made.put(store, 1)])
    return root


def chunk_count(root: Path) -> int:
    with KVStore(root) as store:
        return len(list(store.chunks()))


def test_limits_are_set_shown_and_taken_away(semkv: Semkv, root: Path) -> None:
    assert semkv("limit", "--store", root).out == "no limits\n"
    outcome = semkv("limit", "--store", root, "--max-bytes", "200GB", "--ttl", "30d")
    assert outcome.code == 0
    assert outcome.out == "the store: at most 200.0 GB, 30d after the last use\n"
    assert semkv("limit", "--store", root, "--namespace", "other", "--ttl", "12h").code == 0
    shown = semkv("limit", "--store", root, "--json").data
    assert [(one["namespace"], one["max_bytes"], one["ttl_s"]) for one in shown] == [
        (None, 200 * 10**9, 30 * 86_400.0),
        ("other", None, 43_200.0),
    ]
    assert shown[0]["bytes"] > shown[1]["bytes"] > 0
    assert semkv("limit", "--store", root, "--ttl", "none").code == 0
    with KVStore(root) as store:
        assert store.lifecycle.limit() == Limit(None, 200 * 10**9)
    assert "limit of namespace other: any size, 12h after the last use" in (
        semkv("info", "--store", root).out
    )
    assert len(semkv("info", "--store", root, "--namespace", "x", "--json").data["limits"]) == 1


@pytest.mark.parametrize(
    "arguments", [["--ttl", "soon"], ["--ttl", "0d"], ["--max-bytes", "much"], ["--dry-run"]]
)
def test_what_is_no_limit_is_refused(semkv: Semkv, root: Path, arguments: list[str]) -> None:
    assert semkv("limit", "--store", root, *arguments).code == 2
    assert semkv("limit", "--store", root).out == "no limits\n"


def test_a_limit_says_what_goes_and_gc_takes_it(semkv: Semkv, root: Path) -> None:
    there = chunk_count(root)
    dry = semkv("limit", "--store", root, "--max-bytes", "1", "--dry-run", "--json")
    assert dry.data["dry_run"] is True
    assert dry.data["over_now"]["over"]["chunks"] == there
    assert semkv("limit", "--store", root).out == "no limits\n"
    told = semkv("limit", "--store", root, "--max-bytes", "1")
    assert "goes with the next that adds, or with semkv gc" in told.out
    assert chunk_count(root) == there
    would = semkv("gc", "--store", root, "--dry-run", "--json").data
    assert would["over"]["chunks"] == there == chunk_count(root)
    done = semkv("gc", "--store", root, "--json").data
    assert {**would, "dry_run": False} == done
    assert chunk_count(root) == 0
    assert semkv("gc", "--store", root).out == "nothing to remove\n"


def test_pins_are_shown_and_hold(semkv: Semkv, root: Path) -> None:
    dry = semkv("pin", "docs/*", "--store", root, "--dry-run", "--json")
    assert dry.data == {"dry_run": True, "sources": 2, "chunks": 3, "states": 0} | {
        "bytes": dry.data["bytes"]
    }
    with KVStore(root) as store:
        assert store.lifecycle.pins() == []
    done = semkv("pin", "docs/a.txt", "nothing", "--store", root)
    assert done.code == 1
    assert "nothing is not in namespace default" in done.err
    assert "1 source pinned: 2 chunks" in done.out
    listed = {
        (one["namespace"], one["name"]): one["pinned"]
        for one in semkv("ls", "--store", root, "--json").data
    }
    assert listed == {
        ("default", "docs/a.txt"): True,
        ("default", "docs/b.txt"): False,
        ("other", "a.txt"): False,
    }
    shown = [line for line in semkv("ls", "--store", root).out.splitlines() if "pinned" in line]
    assert [line.split()[0] for line in shown] == ["source", "docs/a.txt"]
    chunks = semkv("ls", "--store", root, "--chunks", "--json").data
    assert sum(one["pinned"] for one in chunks) == 3, "two of a, one of which b has too"
    semkv("limit", "--store", root, "--max-bytes", "1")
    assert semkv("gc", "--store", root).code == 0
    assert chunk_count(root) == 2
    assert "pinned: docs/a.txt in namespace default" in semkv("info", "--store", root).out

    missing = semkv("unpin", "docs/b.txt", "--store", root)
    assert missing.code == 1
    assert "docs/b.txt in namespace default is not pinned by itself" in missing.err
    assert semkv("unpin", "docs/*", "--store", root).code == 0
    assert semkv("gc", "--store", root).code == 0
    assert chunk_count(root) == 0


def test_namespaces_and_models_are_pinned(semkv: Semkv, two_models: Path) -> None:
    root = two_models
    assert semkv("pin", "--namespace", "other", "--store", root).code == 0
    assert semkv("pin", "--model", "older", "--store", root).code == 0
    with KVStore(root) as store:
        assert store.lifecycle.pins() == [Pin(namespace="other"), Pin(model=OTHER)]
    semkv("limit", "--store", root, "--max-bytes", "0")
    semkv("gc", "--store", root)
    assert chunk_count(root) == 3
    assert semkv("unpin", "--model", OTHER[:16], "--store", root).code == 0
    assert semkv("unpin", "--namespace", "default", "--store", root).code == 1
    semkv("gc", "--store", root)
    assert chunk_count(root) == 2


def test_an_old_model_is_collected(semkv: Semkv, two_models: Path) -> None:
    root = two_models
    semkv("pin", "--model", "older", "--store", root)
    before = chunk_count(root)
    would = semkv("gc", "--store", root, "--model", "older", "--dry-run", "--json").data
    assert would["models"] == {
        "sources": 1,
        "chunks": 1,
        "states": 0,
        "bytes": would["models"]["bytes"],
        "pinned": 1,
    }
    assert chunk_count(root) == before
    done = semkv("gc", "--store", root, "--model", "older")
    assert done.code == 0
    assert "of the models" in done.out
    assert "1 chunk of the models had been pinned" in done.err
    with KVStore(root) as store:
        assert {chunk.model for chunk in store.chunks()} == {FINGERPRINT}
        assert [model.fingerprint for model in store.models()] == [FINGERPRINT]
        assert store.lifecycle.pins() == []
    again = semkv("gc", "--store", root, "--model", "older")
    assert again.code == 2
    assert "semkv info shows its models" in again.err


def test_rm_by_model_and_pattern(semkv: Semkv, two_models: Path) -> None:
    root = two_models
    before = chunk_count(root)
    dry = semkv("rm", "--model", "older", "--store", root, "--dry-run", "--json")
    assert dry.code == 0
    assert (dry.data["sources"], dry.data["chunks"]) == (1, 1)
    assert chunk_count(root) == before
    asked = semkv("rm", "--model", OTHER, "--store", root, answer="n\n")
    assert asked.code == 1
    assert f"Remove everything in model {OTHER[:16]}, 1 chunk," in asked.err
    assert chunk_count(root) == before
    assert semkv("rm", "--model", OTHER, "--store", root, "--yes").code == 0
    assert chunk_count(root) == before - 1
    semkv("pin", "docs/b.txt", "--store", root)
    dry = semkv("rm", "docs/*.txt", "--store", root, "--dry-run")
    assert "2 sources would be removed: 3 chunks" in dry.out
    assert "2 chunks pinned" in dry.out
    assert semkv("rm", "docs/*.txt", "--store", root, "--yes", "--json").data["sources"] == 2
    assert chunk_count(root) == 2
