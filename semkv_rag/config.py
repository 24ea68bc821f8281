"""What a caller may choose per request, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from semkv_rag.errors import OptionError
from semkv_rag.selectors import check_selector

DEFAULT_NAMESPACE = "default"
MAX_NAME_LENGTH = 128
MAX_QUESTION_TOKENS = 256
AUTO: Literal["auto"] = "auto"
FIRST_RATIO = 0.08
"""The ratio that `auto` computes before it estimates anything."""
MAX_PROMISE = 10.0


@dataclass(frozen=True, slots=True)
class Preset:
    """The options that decide what a blend costs and how close it comes, under one name.

    Attributes:
        promise: see `ReuseOptions`.
        least_tokens: see `ReuseOptions`.
    """

    ratio: float
    selector: str
    check_layer: int
    promise: float
    least_tokens: int = 0


# Chosen by the measurements in docs/quality-real.md; nowhere else is a default of these written down.
BALANCED = Preset(ratio=0.17, selector="sensitivity_attention", check_layer=1, promise=0.02)
PRESETS: Mapping[str, Preset] = {
    "fast": replace(BALANCED, ratio=0.08, promise=0.05, least_tokens=96),
    "balanced": BALANCED,
    # Everything is computed but what is right as it is: exact spans, and vLLM's prefix cache.
    "exact": replace(BALANCED, ratio=1.0, promise=0.0),
}
PRESET_FIELDS = tuple(field.name for field in fields(Preset))


@dataclass(frozen=True, slots=True)
class ReuseOptions:
    """How the stored KV of a prompt's chunks is reused. The defaults are those of `balanced`.

    Attributes:
        enabled: False answers as plain vLLM does.
        ratio: recomputed reused tokens / reused tokens, 0 to 1. 1.0 equals plain prefill. `auto`: as
            many as it takes for the expected loss to be at most `promise`, up to all.
        selector: the rule that picks the recomputed tokens, by its name in `semkv_rag.selectors`.
        check_layer: the layer at which selectors that look at deviations compare; layers below it
            are computed for every reused token. At least 1: layer 0 sees no context.
        promise: the loss that `ratio="auto"` may cost on average: the KL divergence from full prefill
            over an answer's tokens, nats a token. Without `auto` it means nothing.
        least_tokens: at least so many reused tokens are recomputed where `ratio` gives fewer, but no
            larger share than `balanced` recomputes. What a question asks for is about as long in a
            short prompt as in a long one. With `auto` it means nothing.
        question_tokens: how many tokens at the prompt's end are the question, for selectors that
            ask what it attends to. None: those behind the last stored chunk, within bounds
            (`semkv_rag.reuse.question`).
        namespace: the tenant whose chunks may be used.
        source_version: of whatever the prompt is made from, by the caller's own naming: for the
            tiers over whole prompts, where a prompt of another version is no donor.
        token_map: whether the report tells what became of each token of the prompt; it is about as long
            as the prompt then.

    Raises:
        OptionError: a value is out of its range; the message says which values are not.
    """

    enabled: bool = True
    ratio: float | Literal["auto"] = BALANCED.ratio
    selector: str = BALANCED.selector
    check_layer: int = BALANCED.check_layer
    promise: float = BALANCED.promise
    least_tokens: int = BALANCED.least_tokens
    question_tokens: int | None = None
    namespace: str = DEFAULT_NAMESPACE
    source_version: str = ""
    token_map: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise OptionError(f"enabled is {self.enabled!r}: use true or false")
        if not isinstance(self.token_map, bool):
            raise OptionError(f"token_map is {self.token_map!r}: use true or false")
        if self.ratio != AUTO and not (_is_number(self.ratio) and 0 <= self.ratio <= 1):
            raise OptionError(f"ratio is {self.ratio!r}: use a number from 0 to 1, or auto")
        if self.selector != BALANCED.selector:
            check_selector(self.selector, knows_risk=self.ratio == AUTO)
        if not _is_number(self.promise) or not 0 <= self.promise <= MAX_PROMISE:
            raise OptionError(f"promise is {self.promise!r}: use nats a token, such as 0.02")
        if type(self.least_tokens) is not int or self.least_tokens < 0:
            raise OptionError(
                f"least_tokens is {self.least_tokens!r}: use a number of tokens, or 0"
            )
        if type(self.check_layer) is not int or self.check_layer < 1:
            raise OptionError(f"check_layer is {self.check_layer!r}: use a layer from 1 up")
        asked = self.question_tokens
        if asked is not None and (type(asked) is not int or not 1 <= asked <= MAX_QUESTION_TOKENS):
            raise OptionError(
                f"question_tokens is {asked!r}: use 1 to {MAX_QUESTION_TOKENS} tokens, or leave it out"
            )
        check_namespace(self.namespace)
        if not isinstance(self.source_version, str):
            raise OptionError(f"source_version is {self.source_version!r}: use a text")

    def ratio_of(self, reused_tokens: int) -> float:
        """What share of so many reused tokens is recomputed, 0 to 1, by `ratio` and `least_tokens`.

        0 for the selector `none`, 1 for `all`; for `auto` the ratio that it begins with.
        """
        if self.ratio == AUTO:
            return FIRST_RATIO if self.promise > 0 else 1.0
        if self.selector in ("none", "all"):
            return float(self.selector == "all")
        least = self.least_tokens / reused_tokens if reused_tokens else 0.0
        return max(float(self.ratio), min(least, BALANCED.ratio))

    @classmethod
    def preset(cls, name: str, **others: Any) -> ReuseOptions:
        """The options of a preset, `fast`, `balanced` or `exact`, with `others` over them.

        Raises:
            OptionError: there is no such preset, an option is unknown, or a value out of its range.
        """
        return cls.from_mapping({"preset": name, **others})

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], base: ReuseOptions | None = None
    ) -> ReuseOptions:
        """`base` (the defaults, when left out) with `values` over it.

        Args:
            values: options by name; `preset`, the name of one of `PRESETS`, stands for ratio, least
                tokens, selector, check layer and promise, where these are not given themselves.
                A ratio without least tokens is meant as it is: they are 0.

        Raises:
            OptionError: a key is unknown, or a value out of its range.
        """
        known = {"preset", *(field.name for field in fields(cls))}
        if unknown := set(values) - known:
            raise OptionError(f"unknown option {sorted(unknown)}: there are {sorted(known)}")
        given = dict(values)
        if "ratio" in given:
            given.setdefault("least_tokens", 0)
        if "preset" in given:
            name = given.pop("preset")
            if not isinstance(name, str) or name not in PRESETS:
                raise OptionError(f"preset is {name!r}: use one of {', '.join(PRESETS)}")
            given = asdict(PRESETS[name]) | given
        return replace(base or cls(), **given)

    def to_mapping(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def options_over(over: Mapping[str, Any], under: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings of options as one: a preset in `over` stands above what `under` says of its fields.

    So does a ratio above the least tokens. None, as a value, is an option that was not set.
    """
    hidden = PRESET_FIELDS if over.get("preset") is not None else ()
    if over.get("ratio") is not None:
        hidden = (*hidden, "least_tokens")
    merged = {name: value for name, value in under.items() if name not in hidden} | dict(over)
    return {name: value for name, value in merged.items() if value is not None}


def check_namespace(name: str) -> str:
    """Return `name` when it can be a namespace: 1 to 128 printable characters.

    Raises:
        OptionError: it cannot.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise OptionError(f"namespace is {name!r}: use 1 to {MAX_NAME_LENGTH} printable characters")
    return name
