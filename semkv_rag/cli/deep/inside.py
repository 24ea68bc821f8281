"""What the workers check themselves: the cache's layout, attention over scattered rows, copy rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semkv_rag.cli.deep.result import FIX, Result
from semkv_rag.cli.output import in_words
from semkv_rag.engine import Engine

RUNS = (1, 10, 100, 500, 2000)
BLOCKS = 64

ATTENTION_TOLERANCES = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.06}
"""The largest relative error of a row's output: far above rounding, far below a token too many."""
FP8_ATTENTION_TOLERANCE = 0.3


def check_layout(engine: Engine, about: Mapping[str, Any]) -> Result:
    """Whether random K and V are read back from scattered blocks, and no other block changes."""
    found = engine.probe("layout", BLOCKS)
    case = in_words(about["layers"], "layer")
    if reason := _left_out(found):
        return Result("layout", case, "left out", message=reason)
    figures = {
        "largest_error": _worst(found, "largest_error"),
        "blocks": found[0]["blocks"],
        "blocks_changed": sum(one["blocks_changed"] for one in found),
    }
    if figures["blocks_changed"]:
        message = "writing to some blocks changed others"
        return Result("layout", case, "fail", figures, message, FIX)
    if not figures["largest_error"] <= _worst(found, "rounding"):
        message = "K and V are not read back as they were written"
        return Result("layout", case, "fail", figures, message, FIX)
    return Result("layout", case, "ok", figures)


def check_attention(engine: Engine, about: Mapping[str, Any], runs: int) -> Result:
    """Whether rows in so many runs attend to what stands before them, and to nothing else."""
    found, case = engine.probe("attention", runs), in_words(runs, "run")
    if reason := _left_out(found):
        return Result("attention", case, "left out", message=reason)
    figures = {name: _worst(found, name) for name in ("largest_error", "rows", "tokens", "ms")}
    most = FP8_ATTENTION_TOLERANCE if _is_fp8(about) else ATTENTION_TOLERANCES[about["dtype"]]
    if not figures["largest_error"] <= most:
        message = f"{figures['largest_error']:.2g} off the dense reference, {most:g} is rounding"
        return Result("attention", case, "fail", figures, message, FIX)
    return Result("attention", case, "ok", figures)


def check_copying(engine: Engine) -> Result:
    """The rates of one layer's KV on its way into the cache and out of it."""
    found = engine.probe("copying", BLOCKS)
    slowest = {name: min(one[name] for one in found) for name in found[0]}
    return Result("copies", in_words(BLOCKS, "block"), "ok", slowest)


def _left_out(found: Sequence[Mapping[str, Any]]) -> str:
    return next((one["left_out"] for one in found if "left_out" in one), "")


def _worst(found: Sequence[Mapping[str, Any]], name: str) -> float:
    """The largest of all ranks; NaN where one of them has it."""
    values = [float(one[name]) for one in found]
    return next((value for value in values if value != value), max(values))


def _is_fp8(about: Mapping[str, Any]) -> bool:
    return str(about["kv_cache_dtype"]).startswith("fp8")
