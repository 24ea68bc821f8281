"""Options are checked, and say what can be used."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import CallableEncoder, Normalisation, PromptCacheOptions
from semkv_rag.prompt_cache.named import encoders_of


@pytest.mark.parametrize(
    "values",
    [
        {"reuse": "answers"},
        {"threshold": 1.5},
        {"threshold": True},
        {"threshold": float("nan")},
        {"thresholds": {"vision": -2}},
        {"top_k": 0},
        {"top_k": 2.0},
        {"delta": 0.0},
        {"delta": 1},
        {"capture_after": 0},
        {"capture_longer_than": -1},
        {"capture_bytes": -1},
    ],
)
def test_values_that_cannot_be_used(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(OptionError, match=rf"{name}.* use "):
        PromptCacheOptions(**values)


def test_thresholds_of_layers() -> None:
    options = PromptCacheOptions(threshold=0.8, thresholds={"vision": 0.95})
    assert (options.threshold_of("vision"), options.threshold_of("semantic")) == (0.95, 0.8)


def test_options_out_of_plain_values() -> None:
    values = {"threshold": 0.9, "thresholds": {"vision": 0.95}, "normalisation": {"case": False}}
    options = PromptCacheOptions.from_mapping(values)
    assert options.threshold_of("vision") == 0.95
    assert options.normalisation == Normalisation(case=False)
    assert PromptCacheOptions.from_mapping(json.loads(json.dumps(options.to_mapping()))) == options
    assert PromptCacheOptions.from_mapping({}) == PromptCacheOptions()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"treshold": 0.9}, r"unknown \['treshold'\]; there are reuse, threshold, "),
        ({"normalisation": {"accents": True}}, "there are unicode, case, white_space"),
        ({"normalisation": {"case": 1}}, "normalisation.case: use true or false"),
        ({"normalisation": "none"}, "normalisation is 'none': use an object"),
        ({"thresholds": 0.9}, "thresholds is 0.9: use an object"),
        ({"threshold": "high"}, "threshold is 'high': use a number"),
        ({"capture": "always"}, "capture is 'always': use true or false"),
    ],
)
def test_plain_values_that_cannot_be_used(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        PromptCacheOptions.from_mapping(values)


def test_thresholds_of_layers_that_are_not_there() -> None:
    options = PromptCacheOptions(thresholds={"vision": 0.9})
    options.check_layers({"semantic", "vision"})
    with pytest.raises(OptionError, match=r"\['vision'\]: the layers are \['semantic'\]"):
        options.check_layers({"semantic"})


def test_encoders_by_name() -> None:
    assert encoders_of(None) is encoders_of({}) is None
    own = CallableEncoder("own", lambda texts: np.ones((len(texts), 2), np.float32))
    given = {"semantic": "minilm", "vision": "phash", "clip": "org/clip:image", "own": own}
    found = encoders_of(given)
    assert found is not None
    assert {layer: (one.name, one.reads) for layer, one in found.items()} == {
        "semantic": ("all-MiniLM-L6-v2", "text"),
        "vision": ("phash-8", "image"),
        "clip": ("org/clip", "image"),
        "own": ("own", "text"),
    }


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"semantic": ""}, "use minilm, phash, or a folder"),
        ({"semantic": ":image"}, "use minilm, phash, or a folder"),
        ({"semantic": "phash"}, "reads text"),
        ({"my layer": "minilm"}, "letters, digits and _"),
        ({"vision": 3}, "3 is no encoder"),
    ],
)
def test_encoders_that_cannot_be_had(layers: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        encoders_of(layers)
