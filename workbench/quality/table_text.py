"""The table in Markdown, all models together: the figures of docs/quality.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from workbench.quality.study import Filter, Scores, control, cross
from workbench.quality.verdict import pooled

NOT_SHOWN = ("kv_deviation@1", "kv_deviation_gradual@2", "plain_x_deviation@2")
"""Left out of the tables; the JSON has them."""
BY_TASK = (
    "kv_deviation_published@1",
    "k_deviation_published@1",
    "plain_attention",
    "query_attention",
    "deviation_weighted_attention@1",
    "two_hop_attention",
    "deviation_x_attention@3",
)
_CAN_NOT = "-"


def tables(
    one: Mapping[str, Scores],
    several: Mapping[str, Scores],
    uncharged: Mapping[str, float],
    selectors: Sequence[str],
    groups: Mapping[str, Filter],
) -> str:
    """All of them, each behind its name.

    Args:
        one, several: by model, the answers to prompts that ask one question, and several.
        uncharged: by way, what its charge leaves to be recomputed, per cent.
        selectors: in the order of the rows.
        groups: of questions, by name.
    """
    shown = [name for name in selectors if name not in NOT_SHOWN]
    all_one, all_several = pooled(one), pooled(several)
    parts = [
        _charged(all_one, uncharged, shown),
        _by_model(one, shown),
        _uncharged(all_one, shown),
        _by_task(all_one, groups),
        _several(all_several, shown),
        _modes(all_one, shown),
    ]
    return "\n\n".join(parts) + "\n"


def _charged(scores: Scores, uncharged: Mapping[str, float], selectors: Iterable[str]) -> str:
    ratios = (2, 5, 10, 15, 20, 30, 50)
    rows = []
    for selector in selectors:
        ways = [f"alone {selector} 32 {ratio}" for ratio in ratios]
        rows.append([_code(selector), *(
            f"{scores.share(way, cross):.0f} ({uncharged[way]:.0f})" if way in scores.ways
            else _CAN_NOT for way in ways
        )])  # fmt: skip
    rows.append(["full prefill", *[""] * (len(ratios) - 1), f"{scores.share('full', cross):.0f}"])
    return _table("alone", _percents(ratios), rows)


def _by_model(models: Mapping[str, Scores], selectors: Iterable[str]) -> str:
    rows = [["full prefill", *(f"{s.share('full', cross):.0f}" for s in models.values())]]
    for selector in selectors:
        ways = [f"alone {selector} 32 {ratio}" for ratio in (15, 20)]
        rows.append([_code(selector), *(_row(scores, ways) for scores in models.values())])
    return _table("alone, 15 / 20 %", map(_code, models), rows)


def _uncharged(scores: Scores, selectors: Iterable[str]) -> str:
    ratios = (2, 5, 10, 15, 20)
    rows = []
    for selector in selectors:
        ways = [f"alone {selector} uncharged {ratio}" for ratio in ratios]
        rows.append([_code(selector), *(_row(scores, [way]) for way in ways)])
    return _table("alone, uncharged", _percents(ratios), rows)


def _by_task(scores: Scores, groups: Mapping[str, Filter]) -> str:
    chosen = {name: which for name, which in groups.items() if which not in (cross, control)}
    ways = {"full prefill": "full", "nothing recomputed": "alone nothing"}
    ways |= {_code(selector): f"alone {selector} 32 15" for selector in BY_TASK}
    rows = [
        [name, *(f"{scores.share(way, which):.0f}" for which in (control, *chosen.values()))]
        for name, way in ways.items()
        if way in scores.ways
    ]
    return _table("alone, 15 %", ["controls", *chosen], rows)


def _several(scores: Scores, selectors: Iterable[str]) -> str:
    modes = ("alone", "left")
    rows = [
        ["full prefill", *[_row(scores, ["full"])] * 2],
        ["nothing recomputed", *(_row(scores, [f"{mode} nothing"]) for mode in modes)],
    ]
    for selector in selectors:
        ways = {m: [f"{m} {selector} 32 {ratio}" for ratio in (10, 15, 20)] for m in modes}
        rows.append([_code(selector), *(_row(scores, each) for each in ways.values())])
    return _table("three at once, 10 / 15 / 20 %", map(_code, modes), rows)


def _modes(scores: Scores, selectors: Iterable[str]) -> str:
    ratios = (5, 10, 15, 20)
    rows: list[list[str]] = []
    modes = [way.removesuffix(" nothing") for way in scores.ways if way.endswith(" nothing")]
    for mode in modes:
        nothing = _row(scores, [f"{mode} nothing"])
        rows.append([f"`{mode}`: nothing recomputed", nothing, *[""] * (len(ratios) - 1)])
        for selector in selectors:
            ways = [f"{mode} {selector} 32 {ratio}" for ratio in ratios]
            if any(way in scores.ways for way in ways):
                rows.append([_code(selector), *(_row(scores, [way]) for way in ways)])
    return _table("one question", _percents(ratios), rows)


def _row(scores: Scores, ways: Iterable[str]) -> str:
    """Shares of cross questions; where nothing could be had, just that."""
    told = [f"{scores.share(w, cross):.0f}" if w in scores.ways else _CAN_NOT for w in ways]
    return _CAN_NOT if set(told) == {_CAN_NOT} else " / ".join(told)


def _table(name: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = [name, *columns]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percents(ratios: Iterable[int]) -> list[str]:
    return [f"{ratio} %" for ratio in ratios]


def _code(name: str) -> str:
    return f"`{name}`"
