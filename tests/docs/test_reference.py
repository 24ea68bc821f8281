"""The reference has an entry for every field of a report and every option, and for nothing else."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
from griffe import Docstring, DocstringSectionKind, Parser
from langchain_semkv import ChatSemKV, SemKVLLM
from llama_index.llms.semkv import SemKV
from vllm.v1.metrics import loggers

from semkv_rag import (
    Completion,
    Engine,
    PrecomputeResult,
    PromptCacheOptions,
    ReuseOptions,
    ReuseReport,
)
from semkv_rag.config import PRESETS
from semkv_rag.connector.metrics import SECONDS, ReuseMetrics
from semkv_rag.engine.gauges import TEXTS
from semkv_rag.prompt_cache.normalise import Normalisation
from semkv_rag.report import Explored
from semkv_rag.token_map import MappedSpan, TokenMap
from workbench.pages import entries
from workbench.settings import ROOT

DOCS = ROOT / "docs"
REPORT = DOCS / "report.md"
OF_AN_ANSWER = ("What happened", "Tokens", "Times", "Prompt cache", "Images", "Token map")


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def documented(kind: Any, section: DocstringSectionKind) -> set[str]:
    """What a class's docstring has in one of its sections; the site shows it."""
    text = inspect.getdoc(kind)
    assert text is not None
    found = Docstring(text).parse(
        Parser.google, warn_unknown_params=False, warn_missing_types=False
    )
    entries = [entry for part in found if part.kind is section for entry in part.value]
    return {name for entry in entries for name in entry.name.split(", ")}


def test_every_field_of_the_report_has_an_entry() -> None:
    tables = [entries(REPORT, heading) for heading in OF_AN_ANSWER]
    told = set().union(*tables)
    of_a_map = names(TokenMap) | names(MappedSpan)
    assert names(ReuseReport) | names(Explored) | of_a_map == told
    # `cached_tokens` is one of the report and of its map.
    assert sum(map(len, tables)) == len(told) + 1, "a field has two entries"


def test_every_field_of_a_run_has_an_entry() -> None:
    assert entries(REPORT, "What a run of precompute reports") == names(PrecomputeResult)


def test_the_metrics_are_ours_and_those_of_vllm() -> None:
    there = inspect.getsource(loggers)
    told = entries(REPORT, "Metrics")
    times = {name for name, _ in SECONDS.values()}
    ours = {f"{name}_total" for name in ReuseMetrics.COUNTERS} | times | set(TEXTS)
    assert {name for name in told if name.startswith("semkv_")} == ours
    theirs = [name for name in told if name not in ours]
    assert theirs
    assert [name for name in theirs if f'name="{name}"' not in there] == []


@pytest.mark.parametrize(
    "kind",
    [
        ReuseOptions,
        PromptCacheOptions,
        Normalisation,
        ReuseReport,
        TokenMap,
        MappedSpan,
        Completion,
        PrecomputeResult,
    ],
)
def test_every_field_is_described_where_the_reference_takes_it_from(kind: Any) -> None:
    assert documented(kind, DocstringSectionKind.attributes) == names(kind)
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    assert re.search(rf"^::: semkv_rag\.(\w+\.)*{kind.__name__}$", api, re.M)


def test_every_argument_of_the_engine_is_described() -> None:
    given = set(inspect.signature(Engine).parameters)
    assert documented(Engine, DocstringSectionKind.parameters) == given


@pytest.mark.parametrize(
    ("page", "kind"),
    [("llama-index.md", SemKV), ("langchain.md", ChatSemKV), ("langchain.md", SemKVLLM)],
)
def test_every_option_of_an_llm_class_has_an_entry(page: str, kind: type) -> None:
    """Each class declares its own options in the base class of its package."""
    package = kind.__module__.partition(".semkv")[0].partition(".")[0]
    own = {
        name
        for base in kind.__mro__
        if base.__module__.startswith(package) and "semkv" in base.__module__
        for name, field in getattr(base, "__annotations__", {}).items()
        if not name.startswith("_") and name in kind.model_fields
    }
    assert "store" in own
    assert own - entries(DOCS / page, "Options") == set()


@pytest.mark.parametrize("page", ["choosing-a-preset.md", "index.md"])
def test_the_presets_are_those_that_there_are(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        told = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        assert preset.ratio == 1.0 or f"{preset.ratio:.0%}".replace("%", " %") in told
