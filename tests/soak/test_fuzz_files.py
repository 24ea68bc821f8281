"""A hundred thousand damaged and forged files: no error but StoreError, in little memory and time."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.store.fuzzing import fuzz, repair_a_store, sound_files

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
logger = logging.getLogger(__name__)  # shown with --log-cli-level=INFO

FILES = 100_000
REPAIRS = 100


def test_damaged_and_forged_files(tmp_path: Path, rounds: int) -> None:
    seed = secrets.randbits(40)
    print(f"mutants from {seed} on")  # noqa: T201 - shown when it fails
    outcome = fuzz(range(seed, seed + FILES * rounds), tmp_path, processes=2)
    for (done, result), count in sorted(outcome.counts.items()):
        logger.info("%s: %s %d", done, result, count)
    logger.info("the slowest, mutant %d, took %.2f s", outcome.slowest, outcome.slowest_s)
    assert outcome.faults == []


def test_stores_of_damaged_and_forged_files_are_repaired(tmp_path: Path, rounds: int) -> None:
    seed = secrets.randbits(40)
    print(f"numbers from {seed} on")  # noqa: T201 - shown when it fails
    with KVStore(tmp_path / "store") as store:
        lost = repair_a_store(store, range(seed, seed + REPAIRS * rounds), sound_files(tmp_path))
    logger.info("%d of the promised files were lost", lost)
    assert lost
