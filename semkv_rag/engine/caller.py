"""The caller of a request: its namespace, carried from the check of its API key to vLLM's engine.

`semkv serve` sets `CALLER` once it has checked a request's key, before it reads anything else. Everything
that vLLM does for the request runs in that context, on every route, because tasks and threads inherit it.
`ReportingLLM` reads it where requests enter the engine. A request without a caller is this process' own
work (a capture, `Engine.generate`). It must name its namespace itself, and is refused otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from semkv_rag.config import DEFAULT_NAMESPACE, ReuseOptions, check_namespace
from semkv_rag.errors import OptionError
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD

_OWN_NAME = "semkv:"
"""How an image is called in vLLM whose client gave it a name."""


@dataclass
class Caller:
    """One request over HTTP.

    Attributes:
        namespace: whose chunks it gets.
        reuse: the options of requests that bring none.
        report: the `kv_transfer_params` of its last answer, once there is one.
    """

    namespace: str
    reuse: ReuseOptions = field(default_factory=ReuseOptions)
    report: dict[str, Any] | None = None


CALLER: ContextVar[Caller | None] = ContextVar("semkv_caller", default=None)


def admitted(extra_args: Mapping[str, Any] | None, caller: Caller | None) -> dict[str, Any]:
    """A request's `SamplingParams.extra_args`, with its namespace in them.

    Args:
        caller: who sent it; None for this process' own work, whose wishes are taken as they are.

    Raises:
        OptionError: a client's option is unknown, has an impossible value or is not the client's; or
            the request has no namespace.
    """
    extra = dict(extra_args or {})
    transfer = extra.get(TRANSFER_FIELD)
    wishes = wishes_of(transfer)
    if caller is None:
        if "namespace" not in wishes:
            raise OptionError("the request has no namespace: it is not answered")
        check_namespace(wishes["namespace"])
    else:
        wishes = {**wishes, "namespace": _agreed(wishes, caller)}
        ReuseOptions.from_mapping(wishes, caller.reuse)
    extra[TRANSFER_FIELD] = {**(transfer or {}), PARAMS_KEY: wishes}
    return extra


def namespace_in(extra_args: Mapping[str, Any]) -> str:
    """The namespace of a request that was admitted."""
    return str(extra_args[TRANSFER_FIELD][PARAMS_KEY]["namespace"])


def wishes_of(transfer: Any) -> dict[str, Any]:
    """Our part of a request's `kv_transfer_params`, which may be anything that JSON can be.

    Raises:
        OptionError: it is not of the form that it has to be.
    """
    if transfer is None:
        return {}
    wishes = transfer.get(PARAMS_KEY, {}) if isinstance(transfer, dict) else None
    if not isinstance(wishes, dict):
        raise OptionError(f'{TRANSFER_FIELD} is an object: {{"{PARAMS_KEY}": {{"ratio": 0.15}}}}')
    return wishes


def _agreed(wishes: Mapping[str, Any], caller: Caller) -> str:
    # A request that may name its namespace has been asked for it before it was let in.
    if wishes.get("namespace") not in (None, caller.namespace):
        raise OptionError("the namespace comes from the server, not from the request")
    return caller.namespace


def cache_salt(namespace: str, given: str | None) -> str | None:
    """vLLM's `cache_salt` of a request: requests with another one share no cached block with it.

    Args:
        given: the request's own salt. What it holds cannot make the salt that of another namespace.
    """
    if namespace == DEFAULT_NAMESPACE and given is None:
        return None
    return blake3(json.dumps([namespace, given]).encode()).hexdigest()


def image_name(namespace: str, given: str) -> str:
    """The name in vLLM of an image that its client calls `given`: no other tenant's image has it."""
    if namespace == DEFAULT_NAMESPACE and not given.startswith(_OWN_NAME):
        return given
    return _OWN_NAME + blake3(json.dumps([namespace, given]).encode()).hexdigest()
