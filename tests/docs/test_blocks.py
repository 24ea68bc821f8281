"""The code blocks of the README and of the guides run.

The blocks of a page run in their order in one namespace, in a folder where the model that the pages name
is a tiny one, the documents are a few lines, and the store has them. `NAMES` has what a page takes for
granted, such as a vector store. A block that cannot be run says why in a comment: `<!-- not run: … -->`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.vector_stores import SimpleVectorStore
from PIL import Image

from semkv_rag.cli import app
from semkv_rag.llm import close_engines
from workbench.pages import Block, blocks
from workbench.server import Server
from workbench.settings import ROOT

PAGES = (
    "README.md",
    "docs/index.md",
    "docs/llama-index.md",
    "docs/langchain.md",
    "docs/precompute.md",
    "docs/prompt-cache.md",
    "docs/images.md",
    "docs/choosing-a-preset.md",
    "docs/look-at-a-prompt.md",
    "docs/quality-of-your-model.md",
    "docs/sizing.md",
    "docs/lifecycle.md",
)
SERVED = "docs/serve.md"
RUN = ("precompute", "info", "ls", "verify")
"""The commands that are run, too, where they stand in a page's bash."""
MARKED = 3
"""No more blocks than these are not run."""

PREFIX = "Answer by these passages:"
PUMP = "The pump is started by its green button. It stands in the cellar, behind the boiler.\n\n"
TEXTS = {"docs/pump.md": PUMP * 3, "manuals/valve.txt": "The valve opens to the left.\n" * 9}
PROMPT = f"{PUMP * 3}How is the pump started?"


def llama_index_names() -> dict[str, Any]:
    documents = [Document(text=text, id_=name) for name, text in TEXTS.items()]
    return {
        "documents": documents,
        "index": VectorStoreIndex.from_documents(documents),
        "embed_model": Settings.embed_model,
        "vector_store": SimpleVectorStore(),
    }


def langchain_names() -> dict[str, Any]:
    return {
        "documents": [
            LangChainDocument(page_content=text, metadata={"source": name})
            for name, text in TEXTS.items()
        ],
        "vectors": InMemoryVectorStore(DeterministicFakeEmbedding(size=8)),
    }


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": llama_index_names,
    "docs/index.md": llama_index_names,
    "docs/llama-index.md": llama_index_names,
    "docs/langchain.md": langchain_names,
    "docs/images.md": lambda: {"image": Image.new("RGB", (32, 32), "red")},
}


REPLACED = {
    # vLLM's own classes of such models need torchvision, which the pinned set has not.
    "docs/images.md": {'store="kv/"': 'store="kv/", model_impl="transformers"'},
}


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]
) -> Iterator[Path]:
    """What every page finds: models, documents, and a store with the documents."""
    folder = tmp_path_factory.mktemp("prepared")
    models = {
        "Qwen/Qwen3-8B": "qwen3",
        "Qwen/Qwen3-4B": "qwen3",
        "HuggingFaceM4/Idefics3-8B-Llama3": "llava",
    }
    for name, arch in models.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(tiny_model(arch))
    questions = json.dumps({"prompt": PROMPT}) + "\n"
    files = {**TEXTS, "faq.md": PUMP, "prefix.txt": PREFIX, "questions.jsonl": questions}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        store = ["--model", "Qwen/Qwen3-8B", "--store", "kv/"]
        assert not app(["precompute", "docs/", *store], standalone_mode=False)
    yield folder
    close_engines()


@pytest.fixture
def folder(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's commands and programs run; pages that name the same options share an engine."""
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=8))
    handlers = list(get_dispatcher().event_handlers)
    yield prepared
    get_dispatcher().event_handlers[:] = handlers
    Settings._llm = None
    Settings.tokenizer = None  # type: ignore[assignment]  # the default again


def run_page(page: str, names: dict[str, Any], replaced: dict[str, str] | None = None) -> int:
    """Run a page's blocks; how many they were."""
    path, ran = ROOT / page, 0
    for block in blocks(path):
        if block.not_run is None and block.language == "python":
            source = block.source
            for told, real in (replaced or {}).items():
                source = source.replace(told, real)
            # Behind empty lines, so that an error names the page's own line.
            exec(compile("\n" * (block.line - 1) + source, path, "exec"), names)  # noqa: S102
            ran += 1
        elif block.not_run is None and block.language == "bash":
            for words in commands(block):
                if words[0] == "semkv" and words[1] in RUN:
                    assert not app(words[1:], standalone_mode=False), words
                    ran += 1
    return ran


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without comments and what a pipe leads to."""
    lines = block.source.replace("\\\n", " ").splitlines()
    split = (shlex.split(line.split(" && ")[0], comments=True) for line in lines)
    return [words for words in split if words]


@pytest.mark.engine
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_run(page: str, folder: Path) -> None:
    names = {"prompt": PROMPT, **NAMES.get(page, dict)()}
    assert run_page(page, names, REPLACED.get(page))
    if "answer" in names and "image" not in names:
        assert names["answer"].report.kv_cache == "hit"


def test_the_blocks_about_the_server_run(server: Server, folder: Path) -> None:
    names = {"messages": [{"role": "user", "content": PROMPT}]}
    replaced = {
        "http://localhost:8000/v1": server.base_url,
        "MODEL": server.model,
        'api_key="…"': f'api_key="{server.api_key}"',
    }
    assert run_page(SERVED, names, replaced)


def test_few_blocks_are_left_out() -> None:
    marked = [block for page in (*PAGES, SERVED) for block in blocks(ROOT / page) if block.not_run]
    assert len(marked) <= MARKED


def test_every_block_says_its_language() -> None:
    bare = {
        f"{page}:{block.line}"
        for page in (*PAGES, SERVED)
        for block in blocks(ROOT / page)
        if not block.language
    }
    assert bare == set()
