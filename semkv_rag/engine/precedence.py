"""Who goes first within a step: while a request's prompt is computed, those that stand behind it rest.

vLLM's `priority` policy orders the requests that wait. Those that run share every step with whoever is
let in, so one client's long prompts would lengthen another's first step all the same. `ReportingLLM`
gives a request the higher a number the more its namespace has under way. While a request is in its
prefill, vLLM leaves out those with higher numbers that run, and lets in none of those that wait.

Nobody rests for a request that gets no place, or in more than `MOST_RESTS` steps one behind the other.
Where all numbers are the same, as without tenants, nothing happens here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_RESTS = 8
_NEVER = 1 << 62


@dataclass
class _Live:
    """A request that has not ended.

    Attributes:
        passed_over: whether the last step left it out though nobody went before it.
        eligible: what vLLM held of it before it rested; None while it does not rest.
    """

    request: Request
    passed_over: bool = False
    eligible: int | None = None


class Precedence:
    """One per engine, in the scheduler's thread."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._priorities: Counter[int] = Counter()
        self._first: int | None = None
        self._rests = 0

    def arrived(self, request: Request) -> None:
        """Called for each new request, before the step that may let it in."""
        self._live[request.request_id] = _Live(request)
        self._priorities[request.priority] += 1
        self._arrange({})

    def ended(self, request: Request) -> None:
        """Called for each request that ends, in whatever way."""
        if self._live.pop(request.request_id, None) is None:
            return
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._arrange({})

    def may_begin(self, request: Request) -> bool:
        """Whether a request that waits may be let in by the step that is being made."""
        return self._first is None or request.priority <= self._first

    def stepped(self, computed: Mapping[str, int]) -> None:
        """Called when a step is made.

        Args:
            computed: the tokens of each of its requests that will be computed behind it.
        """
        for name, live in self._live.items():
            live.passed_over = name not in computed and live.eligible is None
        self._rests = 0 if self._first is None else self._rests + 1
        self._arrange(computed)

    def _arrange(self, computed: Mapping[str, int]) -> None:
        """Have those rest in the next step that stand behind one in its prefill.

        Args:
            computed: tokens that vLLM has not counted as computed yet.
        """
        self._first = None
        if len(self._priorities) > 1 and self._rests < MOST_RESTS:
            self._first = min(
                (
                    live.request.priority
                    for name, live in self._live.items()
                    if not live.passed_over
                    and computed.get(name, live.request.num_computed_tokens)
                    < live.request.num_prompt_tokens
                ),
                default=None,
            )
        for live in self._live.values():
            rests = self._first is not None and live.request.priority > self._first
            if rests and live.eligible is None:
                live.eligible = live.request.next_decode_eligible_step
                live.request.next_decode_eligible_step = _NEVER
            elif not rests and live.eligible is not None:
                live.request.next_decode_eligible_step = live.eligible
                live.eligible = None
