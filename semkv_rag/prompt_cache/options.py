"""What a caller may choose of the tiers, checked before anything is looked up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache.normalise import Normalisation

Reuse = Literal["aligned", "substitute"]


@dataclass(frozen=True, slots=True)
class PromptCacheOptions:
    """How prompts that resemble an earlier one are found, and what is done with the earlier one.

    Attributes:
        reuse: `aligned` computes every token that differs from the donor's. `substitute` answers the
            donor's prompt instead, where the guard lets it.
        threshold: the least similarity of a donor, -1 to 1.
        thresholds: that of single layers, by name.
        top_k: candidates that are looked at in each layer.
        delta: with `substitute`, the share of requests to a donor that may be answered wrongly.
        near_images: whether a prompt's image may be taken for the stored one that an image layer
            found near enough. It is answered as if it held that image.
        normalisation: what does not tell two prompts apart in the exact tier.
        capture: whether the KV of prompts is stored after a miss.
        capture_after: only of prompts that were seen this often, this time included.
        capture_longer_than: only of prompts of more tokens.
        capture_bytes: what a namespace's stored prompts may take; the ones unused for longest go.
            None is no limit.

    Raises:
        OptionError: a value is out of its range; the message says which values are not.
    """

    reuse: Reuse = "aligned"
    threshold: float = 0.85
    thresholds: Mapping[str, float] = field(default_factory=dict)
    top_k: int = 5
    delta: float = 0.01
    near_images: bool = False
    normalisation: Normalisation = field(default_factory=Normalisation)
    capture: bool = True
    capture_after: int = 1
    capture_longer_than: int = 0
    capture_bytes: int | None = 32 << 30

    def __post_init__(self) -> None:
        if self.reuse not in get_args(Reuse):
            raise OptionError(f"reuse is {self.reuse!r}: use one of {', '.join(get_args(Reuse))}")
        if not isinstance(self.capture, bool):
            raise OptionError(f"capture is {self.capture!r}: use true or false")
        every = {"threshold": self.threshold}
        every |= {f"thresholds[{layer!r}]": value for layer, value in self.thresholds.items()}
        for name, value in every.items():
            if not _is_number(value) or not -1 <= value <= 1:
                raise OptionError(f"{name} is {value!r}: use a number from -1 to 1")
        if not _is_number(self.delta) or not 0 < self.delta < 1:
            raise OptionError(f"delta is {self.delta!r}: use a number above 0 and below 1")
        for name, least in (("top_k", 1), ("capture_after", 1), ("capture_longer_than", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise OptionError(f"{name} is {value!r}: use a number from {least} up")
        for name in ("near_images", "capture"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {getattr(self, name)!r}: use true or false")
        size = self.capture_bytes
        if size is not None and (type(size) is not int or size < 0):
            raise OptionError(f"capture_bytes is {size!r}: use a number of bytes, or None")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PromptCacheOptions:
        """Options out of plain JSON values; what is left out has its default.

        Raises:
            OptionError: a field is unknown, or a value out of its range.
        """
        taken = dict(_checked_fields(cls, values, "tiers"))
        for name in ("thresholds", "normalisation"):
            if not isinstance(taken.get(name, {}), Mapping | Normalisation):
                raise OptionError(f"{name} is {taken[name]!r}: use an object")
        if isinstance(normalisation := taken.get("normalisation"), Mapping):
            chosen = _checked_fields(Normalisation, normalisation, "normalisation")
            if wrong := [name for name, value in chosen.items() if not isinstance(value, bool)]:
                raise OptionError(f"normalisation.{wrong[0]}: use true or false")
            taken["normalisation"] = Normalisation(**chosen)
        return cls(**taken)

    def to_mapping(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return {**asdict(self), "thresholds": dict(self.thresholds)}

    def check_layers(self, layers: Collection[str]) -> None:
        """Raise OptionError when there is a threshold of a layer that there is not."""
        if unknown := set(self.thresholds) - set(layers):
            raise OptionError(f"thresholds of {sorted(unknown)}: the layers are {sorted(layers)}")

    def threshold_of(self, layer: str) -> float:
        """The least similarity of a donor in a layer."""
        return self.thresholds.get(layer, self.threshold)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_fields(kind: type[Any], values: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    known = [field.name for field in fields(kind)]
    if unknown := set(values) - set(known):
        raise OptionError(f"{what}: unknown {sorted(unknown)}; there are {', '.join(known)}")
    return values
