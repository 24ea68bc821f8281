"""The compose file, by the schema that `docker compose` checks; see `requirements/deploy.txt`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, validators

from workbench.settings import ROOT

SCHEMA = ROOT / "build/deploy/check_jsonschema/builtin_schemas/vendor/compose-spec.json"

pytestmark = pytest.mark.soak


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
    return loaded


def faults(compose: dict[str, Any]) -> list[str]:
    if not SCHEMA.exists():
        pytest.skip("make build/deploy/.ready fetches the schema")
    schema = json.loads(SCHEMA.read_text())
    check = validators.validator_for(schema, default=Draft202012Validator)
    return [error.message for error in check(schema).iter_errors(compose)]


def test_the_file_is_valid(compose: dict[str, Any]) -> None:
    assert len(compose["services"]) > 4
    assert faults(compose) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory", "1gb"),
        ("healthcheck", {"test": 1}),
        ("depends_on", {"postgres": {"condition": "up"}}),
    ],
)
def test_what_is_wrong_is_found(compose: dict[str, Any], field: str, value: object) -> None:
    compose["services"]["semkv"][field] = value
    assert faults(compose) != []
