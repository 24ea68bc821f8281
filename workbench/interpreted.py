"""Programs in Triton's interpreter, or with Triton's compiler, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

from workbench.settings import ROOT

TRITON = ROOT / "build" / "triton"
"""Triton is in no environment of ours on a CPU: `make soak` puts it here."""


def interpreted(*arguments: str, timeout_s: float = 300) -> str:
    """What Python prints with these arguments.

    Raises:
        AssertionError: it failed.
    """
    return with_triton(*arguments, timeout_s=timeout_s, TRITON_INTERPRET="1")


def with_triton(*arguments: str, timeout_s: float, **environment: str) -> str:
    """The same where Triton is at hand, and not its interpreter: nothing can be launched.

    Raises:
        AssertionError: it failed.
    """
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{TRITON}", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
