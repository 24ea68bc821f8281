"""While one request's prompt is computed, those that stand behind it rest; nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from semkv_rag.connector.scheduler.precedence import MOST_RESTS, Precedence
from workbench import forkserver, steps


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is seen of real steps of vLLM."""
    return forkserver.call(steps.who_gets_tokens, tmp_path_factory.mktemp("store"))


@pytest.mark.engine
def test_others_rest_while_the_first_is_in_its_prefill(told: dict[str, Any]) -> None:
    at = told["behind"]["at"]
    asked_behind = told["steps before the first"]
    first_token = asked_behind + told["steps of its prefill"]
    assert at["first"][0] == first_token, "the whole of each step was its own"
    for other in (name for name in at if name.startswith("other")):
        assert not [step for step in at[other] if asked_behind < step <= first_token]
        assert first_token + 2 in at[other], "and behind the late one's step they go on"
    assert at["late"][0] > first_token


@pytest.mark.engine
def test_nobody_who_decodes_rests_for_an_equal(told: dict[str, Any]) -> None:
    for at in told["equal"]["at"].values():
        assert at == list(range(at[0], at[0] + len(at)))


@pytest.mark.engine
def test_who_has_rested_answers_as_alone(told: dict[str, Any]) -> None:
    for case in ("equal", "behind"):
        assert told[case]["tokens"] == told["alone"]


class Asked:
    """What `Precedence` sees of vLLM's `Request`."""

    def __init__(self, name: str, priority: int, prompt: int = 10, salt: str = "") -> None:
        self.request_id = name
        self.cache_salt = salt or name
        self.priority = priority
        self.num_prompt_tokens = prompt
        self.num_computed_tokens = 0
        self.next_decode_eligible_step = 3
        self.status = RequestStatus.WAITING
        self.num_in_flight_tokens = self.num_stale_output_tokens = 0
        self.num_output_placeholders = 2
        self.drop_stale_output = False

    @property
    def rests(self) -> bool:
        return self.next_decode_eligible_step != 3


def arrived(*asked: Asked) -> Any:
    precedence: Any = Precedence()
    for one in asked:
        precedence.arrived(one)
    return precedence


def test_others_go_on_beside_one_that_gets_no_place() -> None:
    runs, waits = Asked("runs", 1), Asked("waits", 0)
    precedence = arrived(runs, waits)
    runs.num_computed_tokens = 10
    rested = []
    for step in range(6):
        precedence.stepped({} if runs.rests else {"runs": 11 + step})
        rested.append(runs.rests)
        assert precedence.may_begin(runs) != runs.rests
    assert rested == [False, True] * 3, "in steps without work"
    precedence.stepped({"waits": 4})  # it has got one
    assert runs.rests
    precedence.stepped({"waits": 10})
    assert not runs.rests


def test_nobody_rests_in_too_many_steps() -> None:
    runs, long = Asked("runs", 1), Asked("long", 0, prompt=1000)
    precedence = arrived(runs, long)
    rested = []
    for step in range(3 * MOST_RESTS):
        rested.append(runs.rests)
        precedence.stepped({"long": step})
    assert rested[:MOST_RESTS] == [True] * MOST_RESTS
    assert rested.count(False) == 2


def test_of_equals_the_one_with_less_left_goes_first() -> None:
    long, short = Asked("long", 0, prompt=900), Asked("short", 0, prompt=200)
    precedence = arrived(long, short)
    assert (long.rests, short.rests) == (True, False)
    assert not precedence.may_begin(long)
    long.num_computed_tokens = 750  # it has less left now
    precedence.stepped({"short": 10})
    assert (long.rests, short.rests) == (False, True)
    precedence.stepped({"long": 900})
    assert (long.rests, short.rests) == (False, False), "its answer holds up nobody"


def test_nobody_rests_for_another_of_the_same_namespace() -> None:
    long, short = Asked("long", 3, prompt=900, salt="a"), Asked("short", 0, salt="a")
    arrived(long, short)
    assert not long.rests
    other = Asked("other", 1, prompt=20, salt="b")
    arrived(long, short, other)
    assert (long.rests, short.rests, other.rests) == (True, False, True)


def test_who_ends_or_is_gone_holds_up_nobody() -> None:
    runs, first, second = Asked("runs", 2), Asked("first", 0), Asked("second", 1)
    precedence = arrived(runs, first, second)
    assert (runs.rests, second.rests, first.rests) == (True, True, False)
    precedence.ended(first)
    assert (runs.rests, second.rests) == (True, False)
    precedence.ended(first)
    precedence.ended(second)
    assert not runs.rests
    precedence.ended(runs)
    assert arrived(runs).may_begin(runs)


def test_one_that_was_sent_back_goes_first_again() -> None:
    runs, first = Asked("runs", 1), Asked("first", 0)
    precedence = arrived(runs, first)
    precedence.stepped({"first": 10})
    assert not runs.rests
    first.num_computed_tokens = 0
    precedence.stepped({"first": 3})
    assert runs.rests


def test_nobody_rests_for_one_that_is_being_blended() -> None:
    """Blends take what a step leaves: nothing is won by leaving others out of it."""
    runs, blends = Asked("runs", 1), Asked("blends", 0)
    precedence = arrived(runs, blends)
    assert runs.rests
    blends.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    precedence.stepped({})
    assert not runs.rests
    blends.status = RequestStatus.RUNNING
    precedence.stepped({"blends": 4, "runs": 4})
    assert runs.rests


def test_one_that_vllm_schedules_anew_still_rests() -> None:
    """vLLM's second model runner sets the field behind each step that a request was in."""
    runs, first = Asked("runs", 1), Asked("first", 0)
    precedence = arrived(runs, first)
    precedence.stepped({"first": 4})
    runs.next_decode_eligible_step = 3  # as if it had been in the step
    assert not runs.rests
    precedence.updated()
    assert runs.rests
    precedence.ended(first)
    assert not runs.rests


def test_one_that_was_taken_back_rests_until_nothing_of_it_is_under_way() -> None:
    spoilt = Asked("spoilt", 0)
    precedence = arrived(spoilt)
    precedence.took_back("spoilt")
    assert not spoilt.rests, "it waits: its blend failed, and no step has it"
    spoilt.status, spoilt.num_in_flight_tokens = RequestStatus.RUNNING, 1
    precedence.took_back("spoilt")
    assert spoilt.rests
    assert (spoilt.num_stale_output_tokens, spoilt.drop_stale_output) == (1, True)
    assert spoilt.num_output_placeholders == 0
    for _ in range(2):
        precedence.stepped({})
        precedence.updated()
        assert spoilt.rests
    spoilt.num_in_flight_tokens = 0
    precedence.updated()
    assert not spoilt.rests
    precedence.took_back("gone")
