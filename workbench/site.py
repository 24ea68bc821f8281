"""What mkdocs calls while it builds the site: `../examples`, to which pages link, is made part of it."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from workbench.settings import ROOT

EXAMPLES = ROOT / "examples"


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(EXAMPLES.glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../examples/", "](examples/")
