"""Whose chunks a request is about."""

from __future__ import annotations

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.server.tenants import Tenancy


def tenancy(*, trust: bool) -> Tenancy:
    return Tenancy.of_keys(
        "everybody", {"key of a": "a"}, ["key of all"], trust_request=trust, reuse=ReuseOptions()
    )


def test_the_key_decides_and_else_the_server() -> None:
    for trust in (False, True):
        assert tenancy(trust=trust).namespace_of("key of a", None) == "a"
        assert tenancy(trust=trust).namespace_of("another key", None) == "everybody"
        assert tenancy(trust=trust).namespace_of(None, None) == "everybody"


def test_a_request_decides_where_it_is_trusted() -> None:
    assert tenancy(trust=True).namespace_of("key of a", "b") == "b"
    for wished in ("b", ""):
        with pytest.raises(OptionError, match="comes from the server"):
            tenancy(trust=False).namespace_of("key of a", wished)
    with pytest.raises(OptionError, match="printable"):
        tenancy(trust=True).namespace_of(None, 7)


def test_a_tenant_may_ask_for_what_concerns_itself() -> None:
    rule = tenancy(trust=False)
    for path in ("/v1/completions", "/semkv/v1/forget", "/health"):
        assert rule.allows("key of a", path)
    for path in ("/metrics", "/v1/completions/", "/v1/responses/resp_1", "/what/ever", "/", ""):
        assert not rule.allows("key of a", path)
        assert rule.allows("key of all", path)


def test_who_is_let_in() -> None:
    rule = tenancy(trust=False)
    assert rule.knows("key of a")
    assert rule.knows("key of all")
    for key in (None, "", "key of b", "key of a ", "a", "\ud800"):
        assert not rule.knows(key)
    everybody = Tenancy.of_keys("default", {}, trust_request=False, reuse=ReuseOptions())
    assert everybody.knows(None)
    assert everybody.allows(None, "/metrics")


@pytest.mark.parametrize(
    ("tenants", "operators"), [({"": "a"}, []), ({}, [" k"]), ({"k": "a"}, ["k"]), ({"k": ""}, [])]
)
def test_keys_that_cannot_be(tenants: dict[str, str], operators: list[str]) -> None:
    with pytest.raises(OptionError):
        Tenancy.of_keys("x", tenants, operators, trust_request=False, reuse=ReuseOptions())
