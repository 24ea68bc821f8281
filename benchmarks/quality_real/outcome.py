"""What came of one way to reuse a context."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What came of one way: distance from full prefill at its answer, and the task's score."""

    kl: float
    equal: float
    score: float
    same: bool
    charged: float
    text: str
    worst_kl: float
    risk: dict[str, float] = field(default_factory=dict)
