"""What machines and storage can do: figures of their makers' data sheets, none of them measured here.

They are where a plan begins. What was measured on the machine itself takes their place
(`semkv plan --measure`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semkv_rag.errors import OptionError

EFFICIENCY = 0.5
"""The share of a GPU's peak that prefill reaches. An assumption."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU.

    Attributes:
        peak_tflops: dense, in 16 bits, by its data sheet.
        link_gb_per_s: of its connection to the host, one way, as copies reach it: 0.8 of the bus.
    """

    peak_tflops: float
    link_gb_per_s: float


GPUS: Mapping[str, GPU] = {
    "A10": GPU(125, 25),
    "A100": GPU(312, 25),
    "L4": GPU(121, 25),
    "L40S": GPU(362, 25),
    "RTX4090": GPU(165, 25),
    "H100": GPU(989, 50),
    "H200": GPU(989, 50),
    "B200": GPU(2250, 50),
}

STORAGE_GB_PER_S: Mapping[str, float] = {
    "ram": 20.0,
    "nvme": 7.0,
    "nvme-raid4": 28.0,
    "ssd": 0.5,
    "hdd": 0.2,
    "s3": 1.25,
    "s3-100g": 12.5,
}
"""Reading, one after the other. `s3` is the network's: of 10 and of 100 gigabits a second."""


def gpu_of(name: str) -> GPU:
    """A GPU by its name.

    Raises:
        OptionError: it is not in the table.
    """
    known = {entry.lower(): gpu for entry, gpu in GPUS.items()}
    if name.lower() not in known:
        raise OptionError(
            f"GPU {name!r} is not known: use {', '.join(GPUS)}, or measure it with --measure"
        )
    return known[name.lower()]


def storage_gb_per_s(name: str) -> float:
    """How fast a kind of storage is read, or the number that is given instead of a kind.

    Raises:
        OptionError: it is neither.
    """
    if name in STORAGE_GB_PER_S:
        return STORAGE_GB_PER_S[name]
    try:
        rate = float(name)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise OptionError(
            f"storage {name!r} is not known: use {', '.join(STORAGE_GB_PER_S)}, or a number of GB/s"
        )
    return rate
