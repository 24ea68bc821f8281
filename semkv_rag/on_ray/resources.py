"""How many engines a cluster has room for, and what each takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semkv_rag.errors import OptionError

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
