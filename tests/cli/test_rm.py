"""`semkv rm` takes away what it was told to, and nothing else."""

from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.cli.conftest import Semkv


def left(root: Path) -> list[tuple[str, str]]:
    with KVStore(root) as store:
        assert store.verify().ok
        return sorted((source.namespace, source.name) for source in store.sources())


def files(root: Path) -> int:
    return len(list(root.rglob("*.safetensors")))


def test_a_source_goes_with_the_chunks_nobody_else_has(semkv: Semkv, root: Path) -> None:
    outcome = semkv("rm", "docs/a.txt", "--store", root, "--yes")
    assert outcome.code == 0
    assert "1 source removed" in outcome.out
    assert left(root) == [("default", "docs/b.txt"), ("other", "a.txt")]
    assert files(root) == 4


def test_a_source_of_another_namespace_stays(semkv: Semkv, root: Path) -> None:
    outcome = semkv("rm", "docs/b.txt", "--store", root, "--namespace", "other", "--yes")
    assert outcome.code == 1
    assert "docs/b.txt is not in namespace other" in outcome.err
    assert len(left(root)) == 3


def test_what_is_there_goes_though_another_is_not(semkv: Semkv, root: Path) -> None:
    outcome = semkv("rm", "docs/a.txt", "nothing", "--store", root, "--yes", "--json")
    assert outcome.code == 1
    assert outcome.data["sources"] == 1
    assert ("default", "docs/a.txt") not in left(root)


@pytest.mark.parametrize(("scope", "stays"), [(["--namespace", "default"], 2), (["--all"], 0)])
def test_everything_goes_chunks_without_a_source_too(
    semkv: Semkv, root: Path, scope: list[str], stays: int
) -> None:
    with KVStore(root) as store:
        (source, *_) = store.sources(namespace="default")
        # As a run leaves it that was killed: chunks that no source lists yet.
        chunks = list(store.get(source.model, "default", source.chunk_ids).values())
        copies = {store.path(c.model, "default", c.id): c for c in chunks}
        kept = {path: path.read_bytes() for path in copies}
        store.remove_source(source.model, "default", source.name)
        for path, content in kept.items():
            path.write_bytes(content)
        assert store.add(chunks) == {chunk.id for chunk in chunks}
    assert semkv("rm", *scope, "--store", root, "--yes").code == 0
    assert files(root) == stays
    assert len(left(root)) == (1 if stays else 0)


def test_it_asks_first(semkv: Semkv, root: Path) -> None:
    for answer in ("n\n", ""):
        outcome = semkv("rm", "--all", "--store", root, answer=answer)
        assert outcome.code == 1
        assert "Remove everything" in outcome.err
        assert len(left(root)) == 3
    assert semkv("rm", "--all", "--store", root, answer="y\n").code == 0
    assert left(root) == []


@pytest.mark.parametrize("arguments", [[], ["--all", "docs/a.txt"], ["--all", "--namespace", "x"]])
def test_what_could_be_meant_otherwise_is_refused(
    semkv: Semkv, root: Path, arguments: list[str]
) -> None:
    assert semkv("rm", *arguments, "--store", root, "--yes").code == 2
    assert len(left(root)) == 3
