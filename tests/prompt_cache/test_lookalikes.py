"""The generator of lookalikes, and the guard on its tuning set. The report set is the benchmark's."""

from __future__ import annotations

import pytest

from semkv_rag.prompt_cache.guard import veto
from workbench import lookalikes as data


@pytest.mark.parametrize("same", [False, True])
def test_enough_different_pairs_of_every_kind(same: bool) -> None:
    made = data.pairs("report", same=same, count=400, seed=2)
    assert len({(pair.donor, pair.prompt) for pair in made}) == 400
    assert all(pair.donor != pair.prompt and pair.same is same for pair in made)
    assert not any("{" in pair.donor + pair.prompt for pair in made)
    kinds = data.PARAPHRASES if same else data.LOOKALIKES
    counts = {kind: sum(pair.kind == kind for pair in made) for kind in kinds}
    assert sum(counts.values()) == 400
    assert min(counts.values()) >= 30


def test_seed_decides() -> None:
    first = data.pairs("report", same=False, count=50, seed=1)
    assert first == data.pairs("report", same=False, count=50, seed=1)
    assert first != data.pairs("report", same=False, count=50, seed=2)


def test_sets_share_no_pair() -> None:
    for same in (False, True):
        tuning, report = (data.pairs(s, same=same, count=100, seed=1) for s in ("tuning", "report"))
        assert not {(p.donor, p.prompt) for p in tuning} & {(p.donor, p.prompt) for p in report}


def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [("contraction", "What's the capital of {c}?", "What is the capital of {c}?")]
    monkeypatch.setitem(data._PARAPHRASES, "tuning", few)
    with pytest.raises(ValueError, match="make only"):
        data.pairs("tuning", same=True, count=50, seed=1)


def test_guard_on_the_tuning_set() -> None:
    for pair in data.pairs("tuning", same=False, count=150, seed=1):
        assert veto(pair.donor, pair.prompt) is not None, pair
    for pair in data.pairs("tuning", same=True, count=120, seed=1):
        assert veto(pair.donor, pair.prompt) is None, pair
