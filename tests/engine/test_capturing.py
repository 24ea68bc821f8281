"""How long a capture waits for files that are written one behind the other, slowly."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import capturing, tickets
from semkv_rag.engine.capturing import Capturing
from semkv_rag.engine.tickets import Tickets
from semkv_rag.reuse import token_array

WRITE_S = 0.4


class Writer:
    """Writes a file every `WRITE_S`, in the order of the tickets, up to a number of them."""

    def __init__(self, files: int) -> None:
        self.files = files
        self.told = 0
        self.began = time.monotonic()

    def take(self) -> list[list[dict[str, Any]]]:
        written = min(self.files, int((time.monotonic() - self.began) / WRITE_S))
        tickets, self.told = range(self.told, written), max(self.told, written)
        return [[{"ticket": ticket, "bytes": 7, "error": None} for ticket in tickets]]


def prefilled(_item: CaptureItem, _ticket: int) -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


@pytest.mark.parametrize("files", [4, 2])
def test_a_file_behind_others_is_waited_for_while_these_are_written(
    files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "WRITE_TIMEOUT_SECONDS", 2 * WRITE_S)
    monkeypatch.setattr(tickets, "ASKED_S", 0.01)
    nothing = token_array([])
    items = [
        CaptureItem(f"{number:064x}", "default", "document", token_array([number]), nothing)
        for number in range(4)
    ]
    results = list(Capturing(prefilled, Tickets(Writer(files).take, 1), items, in_flight=4))
    silent = "the engine did not say that it was written"
    assert [one.error for one in results] == [None] * files + [silent] * (4 - files)
