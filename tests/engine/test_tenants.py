"""Whose chunks a request is about."""

from __future__ import annotations

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.tenants import Tenancy
from semkv_rag.errors import OptionError


def tenancy(*, trust: bool) -> Tenancy:
    keys = {"key of a": "a"}
    return Tenancy.of_keys("everybody", keys, trust_request=trust, reuse=ReuseOptions())


def test_the_key_decides_and_else_the_server() -> None:
    for trust in (False, True):
        assert tenancy(trust=trust).namespace_of("key of a", None) == "a"
        assert tenancy(trust=trust).namespace_of("another key", None) == "everybody"
        assert tenancy(trust=trust).namespace_of(None, None) == "everybody"


def test_a_request_decides_where_it_is_trusted() -> None:
    assert tenancy(trust=True).namespace_of("key of a", "b") == "b"
    for wished in ("b", "a", ""):
        with pytest.raises(OptionError, match="comes from the server"):
            tenancy(trust=False).namespace_of("key of a", wished)
    with pytest.raises(OptionError, match="printable"):
        tenancy(trust=True).namespace_of(None, 7)


def test_a_body_gets_the_namespace_written_into_it() -> None:
    body = {"kv_transfer_params": {"semkv": {"ratio": 0.2}, "other": 1}}
    tenancy(trust=False).apply(body, "key of a")
    assert body == {"kv_transfer_params": {"semkv": {"ratio": 0.2, "namespace": "a"}, "other": 1}}
