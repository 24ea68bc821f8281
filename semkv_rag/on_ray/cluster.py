"""The Ray cluster that a run uses: one that is there, or one that is started for it on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from semkv_rag.errors import EngineError, MissingExtraError, OptionError

ADDRESS = "RAY_ADDRESS"
"""Where Ray itself looks for a cluster's address."""

_OF_A_SHARE = 0.9
"""An engine takes so much of its share of a GPU's memory: its own start needs some beside."""


@dataclass(frozen=True, slots=True)
class EngineResources:
    """What of a cluster's resources engines take.

    Attributes:
        engines: how many are started; None for as many as fit.
        cpus: of each, for Ray's count and, on CPUs, for its threads; may be a fraction.
        gpus: of each; may be a fraction. None for one for each rank where the cluster has GPUs.
    """

    engines: int | None = None
    cpus: float = 1.0
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.engines is not None and (type(self.engines) is not int or self.engines < 1):
            raise OptionError(f"{self.engines!r} engines: use a number from 1 up, or leave it out")
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if value is None and name == "gpus":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < 2**20:  # type: ignore[operator]
                raise OptionError(f"an engine's {name} are {value!r}: use a number from 0 up")
        if not self.cpus and self.gpus == 0:
            raise OptionError("an engine has neither CPUs nor GPUs: give it some")


@dataclass(frozen=True, slots=True)
class Share:
    """What each engine takes, and how many there are."""

    engines: int
    cpus: float
    gpus: float


def share(wanted: EngineResources, there: Mapping[str, float], ranks: int) -> Share:
    """What engines take of the resources that are there.

    Args:
        there: as Ray names them: `CPU` and `GPU`.
        ranks: of an engine: tensor parallel times pipeline parallel size.

    Raises:
        OptionError: not one fits.
    """
    has_gpus = there.get("GPU", 0.0) > 0
    gpus = (float(ranks) if has_gpus else 0.0) if wanted.gpus is None else float(wanted.gpus)
    if wanted.engines is not None:  # a cluster may grow for them
        return Share(wanted.engines, wanted.cpus, gpus)
    fitting = [
        int(there.get(name, 0.0) / each)
        for name, each in (("CPU", wanted.cpus), ("GPU", gpus))
        if each
    ]
    if min(fitting) < 1:
        raise OptionError(
            f"an engine takes {wanted.cpus:g} CPUs and {gpus:g} GPUs, and the cluster has"
            f" {there.get('CPU', 0.0):g} and {there.get('GPU', 0.0):g}: give engines less, or say how"
            " many engines a growing cluster will have"
        )
    return Share(min(fitting), wanted.cpus, gpus)


def engine_arguments(given: Mapping[str, Any], gpus: float) -> dict[str, Any]:
    """vLLM's engine arguments for an engine that has so many GPUs of Ray's."""
    arguments = dict(given)
    if 0 < gpus < 1:
        arguments.setdefault("gpu_memory_utilization", round(_OF_A_SHARE * gpus, 3))
    # The ranks are in the actor, on one machine; vLLM would ask Ray for actors of its own.
    arguments.setdefault("distributed_executor_backend", "mp")
    return arguments


def is_here(address: str | None) -> bool:
    """Whether a run will start Ray on this machine."""
    return address in (None, "local") and (address == "local" or not os.environ.get(ADDRESS))


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
    try:
        options = {"include_dashboard": False} if is_here(address) else {}
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"Ray is not there: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()
