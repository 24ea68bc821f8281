"""The Ray cluster that a run uses: one that is there, or one that is started for it on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from semkv_rag.errors import EngineError, MissingExtraError, OptionError

ADDRESS = "RAY_ADDRESS"
"""Where Ray itself looks for a cluster's address."""


def is_here(address: str | None) -> bool:
    """Whether engines will run on this machine, and nowhere else."""
    import ray

    if ray.is_initialized():
        node = ray.get_runtime_context().get_node_id()
        return all(one["NodeID"] == node for one in ray.nodes() if one["Alive"])
    return address in (None, "local") and (address == "local" or not os.environ.get(ADDRESS))


REACHED_S = 10.0
"""A cluster that is there answers within it."""


def check_installed() -> None:
    """Make sure that Ray and what Ray Data wants are there.

    Raises:
        MissingExtraError: they are not.
    """
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "ray", "ray") from error


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Connect to Ray, and leave again what was connected here; the module `ray`.

    Args:
        address: of a cluster, `auto` for the one that runs on this machine, `local` for one that is
            started here. None: as Ray does it, by `RAY_ADDRESS`, else `local`.

    Raises:
        OptionError: the address is one of Ray's client.
        EngineError: Ray cannot be started or reached.
    """
    import ray

    if (address or os.environ.get(ADDRESS) or "").startswith("ray://"):
        raise OptionError(
            f"{address or os.environ[ADDRESS]} is an address of Ray's client, outside of the"
            " cluster: run semkv in the cluster, with `ray job submit`"
        )
    if ray.is_initialized():
        yield ray
        return
    _reach(address or os.environ.get(ADDRESS) or "local")
    try:
        options = {"include_dashboard": False} if is_here(address) else {}
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"Ray is not there: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Make sure that somebody listens at an address; Ray tries for minutes, and ends the process.

    Raises:
        EngineError: nobody does.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # `local`, `auto`, or what Ray says something about
    try:
        socket.create_connection((host, int(port)), REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"Ray is not there: {address}: {error}") from error
