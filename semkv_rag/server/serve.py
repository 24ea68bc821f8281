"""`semkv serve`: vLLM's own OpenAI server with our connector and the tenants' layer in front."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import vllm.envs
from prometheus_client import REGISTRY
from vllm import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.chat import has_chat_template
from semkv_rag.engine.forced_tools import configure_tools
from semkv_rag.engine.launch import platform_defaults, resolve, takes_images, transfer_config
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.engine.recent import RecentRequests
from semkv_rag.engine.startup import Started, start
from semkv_rag.engine.turns import Turns
from semkv_rag.engine.vllm_compat import (
    cli_env_setup,
    make_arg_parser,
    validate_parsed_serve_args,
)
from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import Encoder, PromptCacheOptions
from semkv_rag.server.console import Console
from semkv_rag.server.front import Front
from semkv_rag.server.limits import Limits
from semkv_rag.server.metrics import StateCollector
from semkv_rag.server.routes import Routes
from semkv_rag.server.tenants import Tenancy
from semkv_rag.store import KVStore, StorePlace
from semkv_rag.store.codecs import PLAIN

logger = logging.getLogger(__name__)

CAPTURES_IN_FLIGHT = 2
"""Chunks that one run over HTTP has computed at a time: others wait for their first token meanwhile."""

POLICY = "--scheduling-policy"
MIDDLEWARE = "semkv_rag.server.front.Front"

SWITCH_S = 0.0005
"""Python lets another thread go on after so long. While the server's loop reads a large body, each of the
many small operations of a tier's encoder, which has a thread of its own, waits so long for its turn."""

KEPT_TOGETHER = "VLLM_ENABLE_RESPONSES_API_STORE"
"""vLLM's switch to keep the responses of all clients in one place, by ids that clients may choose."""


class Shown(NamedTuple):
    """Whether there is a console, and whether it may change something."""

    console: bool
    changes: bool


def serve(
    model: str,
    *,
    store: StorePlace,
    index_url: str | None,
    reuse: ReuseOptions,
    namespace: str,
    api_key_namespaces: Mapping[str, str] | None,
    trust_request_namespace: bool,
    operator_key: str | None = None,
    limits: Limits | None = None,
    vllm_args: Sequence[str],
    prompt_cache: PromptCacheOptions | None = None,
    encoders: Mapping[str, Encoder] | None = None,
    ram_bytes: int = 0,
    codec: str = PLAIN,
    console: bool = False,
    console_changes: bool = False,
) -> int:
    """Serve a model until it is interrupted; the process's exit code.

    Args:
        model: a folder or a hub name.
        store: where the store is; `index_url` its index, when that is elsewhere.
        reuse: the options of requests that bring none.
        namespace: of the operator's requests, and of all where no key has one of its own.
        api_key_namespaces: tenants' API keys and the namespace of each.
        trust_request_namespace: whether a request may name its namespace itself.
        operator_key: the key for what concerns all tenants, such as `/metrics`. Keys that are given to
            vLLM (`--api-key`) are the operator's too.
        limits: what one client may take.
        vllm_args: options of vLLM's server, as on its command line.
        prompt_cache: how whole prompts that resemble an earlier one are found and stored; None for not at
            all.
        encoders: of the tiers, by layer; see `semkv_rag.prompt_cache.Cascade`.
        ram_bytes: what stored chunks may take in memory; 0 for none.
        codec: by which chunks are stored.
        console: whether there is a page that shows what reuse does; with `console_changes` documents may
            be pinned and deleted there.

    Raises:
        OptionError: an option cannot be used.
        EngineError: vLLM does not accept the model.
        MissingExtraError: what the tiers need is not installed.
    """
    transfer = transfer_config(
        store,
        index_url=index_url,
        reuse=reuse,
        request_namespace=True,
        ram_bytes=ram_bytes,
        codec=codec,
    )
    arguments = ["--model", model, *vllm_args, "--middleware", MIDDLEWARE]
    arguments += _default_arguments(vllm_args)
    if api_key_namespaces and not any(one.startswith(POLICY) for one in vllm_args):
        arguments += [POLICY, "priority"]  # see ReportingLLM: tenants take turns
    cli_env_setup()
    args = _parse(arguments)
    operator_keys = {*_take_keys(args), *([operator_key] if operator_key is not None else [])}
    tenancy = Tenancy.of_keys(
        namespace,
        api_key_namespaces or {},
        operator_keys,
        trust_request=trust_request_namespace,
        reuse=reuse,
    )
    if api_key_namespaces and getattr(vllm.envs, KEPT_TOGETHER):
        raise OptionError(f"{KEPT_TOGETHER} is set: vLLM does not keep it apart by key; unset it")
    engine_args = AsyncEngineArgs.from_cli_args(args)
    # Not by `args`, which vLLM prints: the index's URL may hold a password.
    config, obstacle = resolve(engine_args, transfer, UsageContext.OPENAI_API_SERVER)
    shelf = KVStore(store, index_url=index_url)
    _log_as_vllm_does()
    sys.setswitchinterval(SWITCH_S)
    starting = partial(
        start,
        config,
        obstacle,
        store=shelf,
        description={"model": args.model, "dtype": str(config.model_config.dtype)},
        prompt_cache=prompt_cache,
        encoders=encoders,
        in_flight=CAPTURES_IN_FLIGHT,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )
    try:
        shown = Shown(console or console_changes, console_changes)
        asyncio.run(_run(args, tenancy, limits or Limits(), starting, shown))
    except KeyboardInterrupt:
        return 130
    finally:
        shelf.close()
    return 0


def _default_arguments(vllm_args: Sequence[str]) -> list[str]:
    """What `platform_defaults` says, as options of vLLM's server."""
    options = [one.partition("=")[0] for one in vllm_args if one.startswith("--")]
    given = {one.removeprefix("--").removeprefix("no-").replace("-", "_") for one in options}
    added: list[str] = []
    for name, value in platform_defaults(given).items():
        option = "--" + name.replace("_", "-")
        added += [option] if value is True else [option, str(value)]
    return added


def _log_as_vllm_does() -> None:
    """Our lines among vLLM's: what the tiers say of each request is one of level INFO."""
    own = logging.getLogger("semkv_rag")
    own.handlers = list(logging.getLogger("vllm").handlers)
    own.setLevel(logging.INFO)
    own.propagate = False


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = make_arg_parser(FlexibleArgumentParser(prog="semkv serve MODEL --store DIR"))
    args: Namespace = parser.parse_args(list(arguments))
    if getattr(args, "kv_transfer_config", None):
        raise OptionError("--kv-transfer-config is set by semkv serve: leave it out")
    validate_parsed_serve_args(args)
    return args


def _take_keys(args: Namespace) -> list[str]:
    """vLLM's own API keys, taken out of its settings: `Front` checks them, on every route.

    vLLM checks them under some paths only, and knows of no tenants.

    Raises:
        OptionError: `--root-path` is not one that the routes can be told by.
    """
    root = args.root_path or ""
    if root and (not root.startswith("/") or root.endswith("/")):
        raise OptionError(f"--root-path is {root!r}: begin it with / and end it without")
    keys = [key for key in (args.api_key or [vllm.envs.VLLM_API_KEY]) if key]
    args.api_key = None
    os.environ.pop("VLLM_API_KEY", None)
    return keys


async def _run(
    args: Namespace,
    tenancy: Tenancy,
    limits: Limits,
    starting: Callable[[], Awaitable[Started]],
    shown: Shown,
) -> None:
    address, sock = setup_server(args, reuse_port=False)
    try:
        started = await starting()
        llm = started.llm
        try:
            routes = _routes(started, args, tenancy, limits, shown)
            state = _register_metrics(started)
            llm.turns = Turns(limits.requests)
            Front.configure(tenancy, limits, routes)
            await llm.reset_mm_cache()
            try:
                stopped = await build_and_serve(llm, address, sock, args)
                await stopped
            finally:
                state.close()
                await asyncio.to_thread(routes.close)
        finally:
            await asyncio.to_thread(llm.shutdown)
    finally:
        sock.close()


def _register_metrics(started: Started) -> StateCollector:
    """Have `/metrics` tell the engine's state, too."""
    assert started.capturer is not None
    state = StateCollector(started.llm.totals, started.capturer, servable=started.gate.servable)
    REGISTRY.register(state)
    return state


def _routes(
    started: Started, args: Namespace, tenancy: Tenancy, limits: Limits, shown: Shown
) -> Routes:
    """The server's own routes; completes the arguments of vLLM's chat on the way."""
    capturer, gate, config = started.capturer, started.gate, started.llm.vllm_config.model_config
    assert capturer is not None
    about: dict[str, Any] = {
        "supports_tools": configure_tools(args),
        "supports_images": takes_images(config),
        "has_chat_template": has_chat_template(capturer.tokenizer, args.chat_template, config),
        "obstacle": None if gate.servable else gate.reason,
    }
    lookup = started.llm.prompt_lookup
    prompts = lookup if isinstance(lookup, PromptLookup) else None
    console = None
    if shown.console:
        recent = started.llm.recent = RecentRequests()
        obstacle = about["obstacle"]
        console = Console(capturer, recent, args.model, obstacle, changes=shown.changes)
    return Routes(tenancy, limits, capturer, about, prompts, console)
