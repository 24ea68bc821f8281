"""What was measured, kept question by question, so that a measurement that was stopped can go on.

A file of JSON lines: the first says what is measured, each other holds one question with its answers. A
line is written when its question is done, so a run that is killed loses the question under way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from blake3 import blake3

from semkv_rag.closing import Closing
from semkv_rag.errors import OptionError
from semkv_rag.quality.comparing import Agreement
from semkv_rag.quality.result import Answered, Sample

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Compared:
    """One question with all its answers.

    Attributes:
        full: its answer by full prefill.
        tokens: of that answer.
        samples: its answers out of reused KV, by the setting's name.
    """

    full: Answered
    tokens: int
    samples: dict[str, Sample]


class Journal(Closing):
    """The questions of one measurement that are done; a context manager.

    Args:
        path: the file; made when it is not there. None keeps nothing.
        about: what is measured, as plain JSON values; another measurement's file is refused.

    Raises:
        OptionError: the file cannot be used, or is another measurement's.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._done: dict[str, Compared] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        first = json.dumps({"semkv_quality": _VERSION, **about}, sort_keys=True)
        try:
            self._file = path.open("a+", encoding="utf-8")
            self._file.seek(0)
            lines = self._file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):  # killed while writing it
                self._file.truncate(sum(len(line.encode()) for line in lines[:-1]))
                del lines[-1]
            if not lines:
                self._write(first)
            elif lines[0].rstrip("\n") != first:
                raise OptionError(
                    f"{path} is of a measurement with another model, other settings or another length of"
                    " answers: give another file"
                )
            self._done = dict(_compared(line) for line in lines[1:])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"{path} cannot be used to resume: {error}") from error

    def get(self, question: str, prompt: Sequence[int]) -> Compared | None:
        """What was measured of a question with this prompt, tokens, or None."""
        return self._done.get(_key(question, prompt))

    def add(self, question: str, prompt: Sequence[int], compared: Compared) -> None:
        """Keep what was measured of a question."""
        if self._file is not None:
            self._write(json.dumps({"key": _key(question, prompt), **asdict(compared)}))

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line + "\n")
        self._file.flush()


def _key(question: str, prompt: Sequence[int]) -> str:
    return blake3(json.dumps([question, *prompt]).encode()).hexdigest()


def _compared(line: str) -> tuple[str, Compared]:
    given = json.loads(line)
    samples = {
        name: Sample(**{**values, "agreement": Agreement(**values["agreement"])})
        for name, values in given["samples"].items()
    }
    return given["key"], Compared(Answered(**given["full"]), given["tokens"], samples)
