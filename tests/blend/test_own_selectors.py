"""Selectors of a user's own: what can be registered, and what packages offer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from semkv_rag import OptionError, ReuseOptions
from semkv_rag import selectors as its
from semkv_rag.blend import Candidates, Selector, register_selector, selector_type
from workbench.selectors import ByChance, DeviationTimesAttention


class Own(Selector):
    def scores(self, candidates: Candidates) -> Tensor:
        return -candidates.rank_in_span.float()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(its, "_registered", dict(its._registered))
    its._offered.cache_clear()
    yield
    its._offered.cache_clear()


def test_a_registered_selector_can_be_asked_for() -> None:
    with pytest.raises(OptionError, match=r"'own'.*or register it"):
        ReuseOptions(selector="own")
    register_selector("own", Own)
    assert ReuseOptions(selector="own").selector == "own"
    assert selector_type("own") is Own
    register_selector("own", Own)  # a second time is no fault
    with pytest.raises(OptionError, match="ratio is auto, which selector own cannot do"):
        ReuseOptions(selector="own", ratio="auto")


def test_what_cannot_be_registered_is_refused() -> None:
    class Inner(Own):
        pass

    for name in ("kv_deviation", "two words", "", 3):
        with pytest.raises(OptionError, match="use an identifier other than"):
            register_selector(name, Own)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no subclass of"):
        register_selector("own", dict)  # type: ignore[type-abstract, arg-type]
    with pytest.raises(OptionError, match=r"cannot import .*Inner"):
        register_selector("own", Inner)
    with pytest.raises(OptionError, match="another class has this name"):
        register_selector("by_chance", DeviationTimesAttention)
    assert selector_type("by_chance") is ByChance


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with three entry points, one of which is right."""
    (tmp_path / "offered_by_a_package.py").write_text(
        "from workbench.selectors import ByChance\n\n\nclass Offered(ByChance):\n    pass\n"
    )
    about = tmp_path / "offered-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[semkv_rag.selectors]\n"
        "offered = offered_by_a_package:Offered\n"
        "gone = offered_by_a_package:Gone\n"
        "other = offered_by_a_package:ByChance.scores\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "offered_by_a_package", raising=False)


@pytest.mark.usefixtures("package")
def test_a_package_offers_selectors_without_a_call() -> None:
    assert ReuseOptions(selector="offered").selector == "offered"
    assert selector_type("offered").__name__ == "Offered"
    for name in ("gone", "other"):
        with pytest.raises(OptionError, match="cannot be imported"):
            ReuseOptions(selector=name)


def test_an_unknown_name_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry_points(group: str) -> list[None]:
        asked.append(group)
        return []

    monkeypatch.setattr(its, "entry_points", entry_points)
    for _ in range(3):
        with pytest.raises(OptionError, match="'best'"):
            ReuseOptions(selector="best")
    assert asked == ["semkv_rag.selectors"]
