"""Where a store may be: folders and URLs, what is refused, and what each needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from semkv_rag.errors import MissingExtraError, ObjectStoreError, OptionError
from semkv_rag.store import KVStore, place_of
from tests.store.shared import environment


@pytest.mark.parametrize(
    ("store", "options", "message"),
    [
        ("ftp://host/x", {}, "cannot be opened"),
        ("s3://", {}, "cannot be opened|names no bucket"),
        ("s3://bucket/x?key=1", {}, "come from the environment"),
        ("s3://bucket/x", {"cache_bytes": 0}, "cache_bytes"),
        ("s3://bucket/x", {"fetch_timeout_ms": -1}, "fetch_timeout_ms"),
        ("a/folder", {"cache_bytes": 5}, "is a folder"),
    ],
)
def test_what_cannot_be_a_place_is_refused(
    store: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        place_of(store, **options)  # type: ignore[arg-type]


def test_a_url_needs_an_index() -> None:
    with pytest.raises(OptionError, match="index_url"):
        KVStore("s3://bucket/prefix")


def test_a_path_is_a_url_again() -> None:
    for text in ("s3://bucket/some/prefix", "gs://bucket/prefix", "file:///some/where"):
        place = place_of(Path(text))
        assert place.objects is not None
        assert place.objects.url == text


@pytest.mark.parametrize(
    ("url", "left_out", "message"),
    [
        ("s3://bucket/prefix", "AWS_ACCESS_KEY_ID", "AccessKeyId"),
        ("az://container/prefix", "AZURE_STORAGE_ACCOUNT_NAME", "Account must be specified"),
    ],
)
def test_without_credentials_it_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, left_out: str, message: str
) -> None:
    for name, value in environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(left_out, raising=False)
    with pytest.raises(ObjectStoreError, match=message):
        KVStore(place_of(url), index_url=f"sqlite:///{tmp_path / 'index.sqlite'}")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"semkv-rag\[object-storage\]"):
        KVStore("s3://bucket/prefix", index_url="sqlite://")
