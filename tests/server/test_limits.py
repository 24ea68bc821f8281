"""What one namespace may have under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semkv_rag.engine.turns import Turns
from semkv_rag.errors import OptionError
from semkv_rag.server.limits import LimitError, Limits, Pace, UnderWay
from semkv_rag.server.routes import Routes
from semkv_rag.server.tenants import Tenancy
from semkv_rag.store import KVStore


@pytest.mark.parametrize(
    "values",
    [{"requests": 0}, {"requests": 1.5}, {"requests": True}, {"body_bytes": None}, {"speed": 1}],
    ids=str,
)
def test_limits_that_cannot_be(values: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        Limits.from_mapping(values)


def test_limits_by_name() -> None:
    limits = Limits.from_mapping({"requests": 3, "namespace_bytes": None})
    assert (limits.requests, limits.runs) == (3, Limits().runs)


def test_one_too_many_is_refused() -> None:
    under_way = UnderWay(1, "requests")
    with (
        under_way.one("a"),
        under_way.one("b"),
        pytest.raises(LimitError, match="1 requests"),
        under_way.one("a"),
    ):
        raise AssertionError
    with under_way.one("a"):
        pass


async def test_turns_are_taken_in_order_and_never_too_many() -> None:
    turns, running, most, done = Turns(3), 0, 0, []

    async def ask(number: int, count: int) -> None:
        nonlocal running, most
        async with turns.taken("a", count):
            running += count
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= count
        done.append(number)

    counts = [1, 3, 2, 1, 1, 3, 2, 2, 1]
    await asyncio.wait_for(asyncio.gather(*(ask(n, c) for n, c in enumerate(counts))), 10)
    assert most == 3
    assert sorted(done) == list(range(len(counts)))
    with pytest.raises(OptionError, match="n up to 3"):
        await ask(9, 4)
    assert turns._queues == {}


async def test_who_gives_up_leaves_its_place() -> None:
    turns = Turns(2)

    async def hold(count: int) -> None:
        async with turns.taken("a", count):
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(hold(count)) for count in (1, 2, 2)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5), turns.taken("a", 2):
        pass
    async with asyncio.timeout(5), turns.taken("b", 2):
        pass


async def test_a_namespace_pays_for_what_it_sent_before_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = Pace(per_second=1)
    await pace.keep("small", 0)
    for _ in range(3):
        await pace.keep("large", 1000)
    await pace.keep("small", 1)
    assert slept == pytest.approx([0, 0, 1000, 2000, 0], abs=60)


async def test_what_is_paid_off_is_not_kept() -> None:
    pace = Pace(per_second=1e9)
    for number in range(100):
        await pace.keep(f"n{number}", 1)
        await asyncio.sleep(0)
    assert len(pace._paid_off) < 10


def test_sources_of_a_model_and_its_adapters_count_together(tmp_path: Path) -> None:
    alone, adapter = "a" * 64, "b" * 64

    def of(model: str) -> Any:
        return SimpleNamespace(store=store, fingerprint=model)

    with KVStore(tmp_path / "store") as store:
        routes = Routes(Tenancy(), Limits(namespace_sources=2), of(alone), {})
        for model in (alone, adapter):
            store.put_source(model, "one", "manual.md", "digest", [])
            assert routes._room(of(model), "one", {"manual.md"}) > 0
        for model in (alone, adapter):
            with pytest.raises(LimitError, match="may have 2 sources and has 2"):
                routes._room(of(model), "one", {"another.md"})
        assert routes._room(of(alone), "two", {"another.md", "third.md"}) > 0
