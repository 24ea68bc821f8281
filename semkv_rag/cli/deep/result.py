"""What the checks find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warn", "fail", "left out"]

FIX = "use other engine arguments (--engine-arg), and report it with the file of --out"


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found in one case.

    Attributes:
        check: the subject; `case` what of it, such as a length.
        status: `fail` where something is wrong; `warn` where reuse does not pay; `left out` where the
            case does not fit this machine or model.
        figures: by name, with the unit behind it (`_ms`, `_bytes_per_s`).
        message: in words, what was found; empty where the figures say it.
        fix: how to mend it.
    """

    check: str
    case: str
    status: Status
    figures: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    fix: str = ""
