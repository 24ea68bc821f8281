"""Checks that a vLLM has what the package uses: names, signatures of overridden methods, attributes.

    python -m workbench.vllm_names [WHEEL_OR_FOLDER]

The vLLM is read, not imported: the installed one, a wheel, or a folder that a wheel was unpacked to.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from workbench.settings import ROOT
from workbench.vllm_names.attributes import ATTRIBUTES
from workbench.vllm_names.checks import problems
from workbench.vllm_names.source import Source
from workbench.vllm_names.uses import uses_of


def installed() -> Source:
    """The vLLM of this environment."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vLLM is not installed: make setup")
    return Source(Path(spec.origin).parents[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workbench.vllm_names", description=__doc__)
    parser.add_argument("place", nargs="?", type=Path, help="a wheel, or the folder vllm/ is in")
    place = parser.parse_args().place
    here = installed()
    try:
        source = here if place is None else Source(place)
    except (OSError, ValueError) as error:
        sys.exit(f"{place}: {error}; pip download --no-deps vllm==VERSION gives a wheel")
    uses = uses_of(ROOT / "semkv_rag")
    found = list(problems(uses, ATTRIBUTES, source, here))
    print("\n".join(found))
    attributes = sum(map(len, ATTRIBUTES.values()))
    print(
        f"{len(uses.imports)} imports, {len(uses.subclasses)} subclasses, {len(uses.calls)} calls and"
        f" {attributes} attributes against {source.place}: {len(found)} do not fit"
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
