"""What `semkv_rag` offers at its root."""

from __future__ import annotations

import inspect
import subprocess
import sys

import semkv_rag
from semkv_rag import errors


def test_all_that_is_offered_is_there_and_says_what_it_is() -> None:
    assert dir(semkv_rag) == sorted(semkv_rag.__all__)
    for name in semkv_rag.__all__:
        offered = getattr(semkv_rag, name)
        assert inspect.getdoc(offered), name


def test_every_error_is_offered() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert kinds <= set(semkv_rag.__all__)


def test_options_and_errors_are_had_without_what_is_heavy() -> None:
    asked = (
        "import sys; from semkv_rag import OptionError, ReuseOptions; ReuseOptions(ratio=0.2);"
        "print(sorted({'torch', 'vllm', 'sqlalchemy', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
