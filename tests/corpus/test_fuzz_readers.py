"""Broken documents give their text or a CorpusError, in time. `tests/soak` has many more of them."""

from pathlib import Path

import pytest

from tests.corpus.fuzzing import KINDS, fuzz

DOCUMENTS = {"txt": 200, "md": 200, "html": 200, "pdf": 12}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_broken_documents(kind: str, tmp_path: Path) -> None:
    outcome = fuzz(kind, range(DOCUMENTS[kind]), tmp_path)
    assert outcome.too_slow == []
    assert outcome.read and outcome.refused, "some are sound enough, and some are not"
