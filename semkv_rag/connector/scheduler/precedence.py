"""Which request goes first within a step. While its prompt is computed, other namespaces' requests rest.

vLLM's `priority` policy orders the requests that wait. It does not order those that run: they come first
in every step. So one client's long prompt takes whole steps, and another client's short prompt waits for
all of them. This module changes that between namespaces, which it knows by vLLM's `cache_salt`.

`ReportingLLM` gives a request a number that grows with what its namespace has under way. Of two
namespaces' requests the one with the lower number goes first; where the numbers are the same, it is the
one that has less of its prompt left. While that one is in its prefill, the other rests: if it runs, vLLM
leaves it out of the step, and if it waits, vLLM does not let it in.

Limits: a request that gets no place in a step has others rest in every other step only, because a step
without work would take no time. No request rests in more than `MOST_RESTS` steps in a row. Nothing rests
for a request that is being blended, because blends take what a step leaves. With a single namespace this
module does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_RESTS = 8
_NEVER = 1 << 62

_Rank: TypeAlias = tuple[int, int]
"""A request's number and the tokens of its prompt that are left: lower goes first."""


@dataclass
class _Live:
    """A request that has not ended.

    Attributes:
        passed_over: whether the last step left it out though nobody went before it. The next step is for
            the others then, and the one behind it is this one's again.
        eligible: what vLLM held of it before it rested; None while it does not rest.
        taken_back: whether it rests until nothing is under way that vLLM has taken back.
    """

    request: Request
    passed_over: bool = False
    eligible: int | None = None
    taken_back: bool = False

    def rank(self, computed: int) -> _Rank:
        left = max(self.request.num_prompt_tokens - computed, 0)
        return self.request.priority, left


class Precedence:
    """Which requests come first; one per engine, in the scheduler's thread."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._namespaces: Counter[str | None] = Counter()
        self._resting = False
        self._rests = 0

    def arrived(self, request: Request) -> None:
        """Called for each new request, before the step that may let it in."""
        self._live[request.request_id] = _Live(request)
        self._namespaces[request.cache_salt] += 1
        self._arrange({})

    def ended(self, request: Request) -> None:
        """Called for each request that ends, in whatever way."""
        if self._live.pop(request.request_id, None) is None:
            return
        self._namespaces[request.cache_salt] -= 1
        if not self._namespaces[request.cache_salt]:
            del self._namespaces[request.cache_salt]
        self._arrange({})

    def may_begin(self, request: Request) -> bool:
        """Whether a request that waits may be let in by the step that is being made."""
        live = self._live.get(request.request_id)
        return live is None or live.eligible is None

    def updated(self) -> None:
        """Called behind each step, before a next one is made.

        With its second model runner vLLM sets anew, once a step is made, when its requests may run again.
        """
        for live in self._live.values():
            if live.taken_back and not live.request.num_in_flight_tokens:
                live.taken_back = False
                self._wake(live)
            elif live.eligible is not None and live.request.next_decode_eligible_step != _NEVER:
                live.eligible = live.request.next_decode_eligible_step
                live.request.next_decode_eligible_step = _NEVER

    def took_back(self, request_id: str) -> None:
        """Called behind the step in which vLLM has taken a running request back, as its KV was no number.

        With asynchronous scheduling later steps with the request may be under way. Their tokens count for
        nothing, and the request rests meanwhile. vLLM does so where it preempts a request, but not here.
        """
        live = self._live.get(request_id)
        if live is None or live.request.status is not RequestStatus.RUNNING:
            return
        live.request.num_stale_output_tokens = live.request.num_in_flight_tokens
        live.request.drop_stale_output = True
        live.request.num_output_placeholders = 0
        live.taken_back = True
        self._rest(live)

    def stepped(self, computed: Mapping[str, int]) -> None:
        """Called when a step is made.

        Args:
            computed: the tokens of each of its requests that will be computed behind it.
        """
        for name, live in self._live.items():
            left_out = name not in computed and live.eligible is None
            live.passed_over = left_out and not live.passed_over
        self._rests = self._rests + 1 if self._resting else 0
        self._arrange(computed)

    def _arrange(self, computed: Mapping[str, int]) -> None:
        """Settle who rests in the next step.

        Args:
            computed: tokens that vLLM has not counted as computed yet.
        """
        if len(self._namespaces) < 2 and not self._resting:
            return
        ranks = {
            name: live.rank(computed.get(name, live.request.num_computed_tokens))
            for name, live in self._live.items()
        }
        first: dict[str | None, _Rank] = {}
        if self._rests < MOST_RESTS:
            for name, live in self._live.items():
                if ranks[name][1] and not live.passed_over and not _is_blended(live.request):
                    salt = live.request.cache_salt
                    first[salt] = min(ranks[name], first.get(salt, ranks[name]))
        best = sorted(first.items(), key=lambda item: item[1])[:2]
        self._resting = False
        for name, live in self._live.items():
            before = next((rank for salt, rank in best if salt != live.request.cache_salt), None)
            rests = before is not None and before < ranks[name]
            self._resting |= rests
            if rests:
                self._rest(live)
            elif not live.taken_back:
                self._wake(live)

    def _rest(self, live: _Live) -> None:
        if live.eligible is None:
            live.eligible = live.request.next_decode_eligible_step
            live.request.next_decode_eligible_step = _NEVER

    def _wake(self, live: _Live) -> None:
        if live.eligible is not None:
            live.request.next_decode_eligible_step = live.eligible
            live.eligible = None


def _is_blended(request: Request) -> bool:
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
