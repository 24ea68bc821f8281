"""The compose file, by the schema that `docker compose` checks; see `requirements/deploy.txt`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator, validators

from tests.deploy.test_files import compose
from workbench.settings import ROOT

SCHEMA = ROOT / "build/deploy/check_jsonschema/builtin_schemas/vendor/compose-spec.json"

pytestmark = pytest.mark.soak


def faults(told: dict[str, Any]) -> list[str]:
    if not SCHEMA.exists():
        pytest.skip("make build/deploy/.ready fetches the schema")
    schema = json.loads(SCHEMA.read_text())
    check = validators.validator_for(schema, default=Draft202012Validator)
    return [error.message for error in check(schema).iter_errors(told)]


def test_the_file_is_valid() -> None:
    assert faults(compose()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory", "1gb"),
        ("healthcheck", {"test": 1}),
        ("depends_on", {"postgres": {"condition": "up"}}),
    ],
)
def test_what_is_wrong_is_found(field: str, value: object) -> None:
    told = compose()
    told["services"]["semkv"][field] = value
    assert faults(told) != []
