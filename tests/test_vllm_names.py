"""What the package uses of vLLM is there, with signatures that fit; the check finds what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.settings import ROOT
from workbench.vllm_names.__main__ import installed
from workbench.vllm_names.attributes import ATTRIBUTES
from workbench.vllm_names.checks import problems
from workbench.vllm_names.source import Source
from workbench.vllm_names.uses import uses_of

VLLM = {
    "__init__.py": "def __getattr__(name):\n    return {'Lazy': '.inner:Real'}[name]\n",
    "inner.py": "from vllm.base import *\nclass Real:\n    def __init__(self, a, *, b=1): self.c = a\n",
    "base.py": (
        "from dataclasses import dataclass\n"
        "class Base:\n"
        "    def step(self, request, tokens): ...\n"
        "    async def wait(self, *, seconds): ...\n"
        "@dataclass\n"
        "class Fields:\n"
        "    first: int\n"
        "    second: int = 0\n"
        "def function(a, b=1, *, c): ...\n"
    ),
}

PACKAGE = """
from vllm import Lazy
from vllm.inner import Base, Fields, function
try:
    from vllm.nowhere import moved
except ImportError:
    from vllm.base import function as moved
class Ours(Base):
    def step(self, request, tokens): super().step(request, tokens)
    async def wait(self, *, seconds): ...
Lazy(1, b=2)
Fields(1, second=2)
function(1, c=3)
"""


def check(folder: Path, package: str = PACKAGE, **files: str) -> list[str]:
    """The problems of a package with another vLLM than it was made for.

    Args:
        files: of that vLLM; the others are as in `VLLM`.
    """
    ours = folder / "ours"
    ours.mkdir()
    (ours / "module.py").write_text(package)
    sources = []
    for name, changed in (("before", {}), ("after", files)):
        for path, text in {**VLLM, **{f"{key}.py": text for key, text in changed.items()}}.items():
            (folder / name / "vllm").mkdir(parents=True, exist_ok=True)
            (folder / name / "vllm" / path).write_text(text)
        sources.append(Source(folder / name))
    attributes = {"vllm.inner:Real": ["c"]}
    return list(problems(uses_of(ours), attributes, sources[1], sources[0]))


@pytest.mark.slow
def test_the_installed_vllm_has_all_of_it() -> None:
    uses = uses_of(ROOT / "semkv_rag")
    assert {"SemKVConnector", "SemKVWorker", "ImageFeatureConnector"} <= {
        one.name for one in uses.subclasses
    }
    assert list(problems(uses, ATTRIBUTES, installed(), installed())) == []


def test_what_fits_is_passed(tmp_path: Path) -> None:
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("class Fields", "class Others", "vllm.inner has no Fields"),
        ("second: int", "other: int", "Fields: it has no second"),
        ("first: int", "zeroth: int\n    first: int", "Fields: it is not given first"),
        ("*, c)", "*, d)", "function: it takes no c"),
        ("def step", "def stepped", "Base has no step, which Ours overrides"),
        ("step(self, request, tokens)", "step(self, request, tokens, more)", "it takes no more"),
        ("step(self, request", "step(self, asked", "its request is asked there"),
        ("*, seconds", "*, minutes", "it takes no minutes"),
        ("async def wait", "def wait", "one of the two is async"),
    ],
)
def test_what_changed_is_found(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in VLLM["base.py"]
    found = check(tmp_path, base=VLLM["base.py"].replace(old, new, 1))
    assert words in "\n".join(found)


def test_an_attribute_and_a_lazy_name_that_are_gone(tmp_path: Path) -> None:
    found = check(tmp_path, inner=VLLM["inner.py"].replace("self.c", "self.d"))
    assert found == ["vllm.inner:Real has no c"]
    (tmp_path / "other").mkdir()
    found = check(tmp_path / "other", __init__="")
    assert found == ["ours/module.py:2: vllm has no Lazy"]


def test_a_moved_name_needs_one_of_its_places(tmp_path: Path) -> None:
    package = "try:\n    from vllm.a import x\nexcept ImportError:\n    from vllm.b import x\n"
    assert len(check(tmp_path, package)) == 1


def test_a_folder_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no vllm/__init__\.py"):
        Source(tmp_path)
