"""A LlamaIndex query engine whose prompts take the KV of their chunks out of a store.

    python examples/query_engine.py
    python examples/query_engine.py --model build/smollm2 --docs examples/articles --neighbours 0
    python examples/query_engine.py --model Qwen/Qwen3-8B --docs ~/manuals --questions asked.json

The documents' KV is precomputed (the second run finds it), then each question is answered three times
by one engine: with reuse, with the stored KV as it is (selector `none`), and by plain vLLM. Prints the
answers and what was reused, and leaves the figures in `build/demo.json`.

Before each answer vLLM's own prefix cache is emptied, so that the times to first token compare the two
ways to get a prompt's KV: computing it, and taking it out of the store.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.llms.semkv import SemKV
from retrieval import make_nodes, make_retriever
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
READER = HERE / "reader"
CORPUS = HERE / "corpus"

# The reader knows this one form of prompt; other models get LlamaIndex's own.
READER_TEMPLATE = PromptTemplate("{context_str} Question : {query_str} Answer :")
READER_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 30,
    # The reader, of four layers, binds what crosses chunks in its first two, which this selector computes
    # for all tokens. Models of a usual size are served better by the default.
    "reuse": ReuseOptions(selector="deviation_weighted_attention"),
}

GENERIC_QUESTIONS = (
    "What are these documents about?",
    "Which people and organisations are named, and what is said of them?",
    "Which dates and numbers are given, and what for?",
)
TOP_K = 4
MAX_TOKENS = 64

BLEND, REUSE_ONLY, PLAIN = "blend", "reuse_only", "plain"

console = Console()


@dataclass(frozen=True)
class Question:
    text: str
    answer: str | None = None  # None: not known, so nothing is said about right and wrong
    also: tuple[str, ...] = ()  # other ways to say it


@dataclass(frozen=True)
class Reply:
    """One answer, with what its calls of the model report (one, unless the context is too long)."""

    text: str
    report: ReuseReport
    ttft_ms: float


@dataclass
class Result:
    """A question and its answers by mode."""

    question: Question
    replies: dict[str, Reply] = field(default_factory=dict)

    def is_right(self, mode: str) -> bool:
        said = self.replies[mode].text
        answers = (self.question.answer or "", *self.question.also)
        return any(re.search(rf"\b{re.escape(one)}\b", said, re.I) for one in answers)


class ModelCalls(BaseEventHandler):
    """Collects what the model says of each call; query engines pass on nothing but the text."""

    calls: list[tuple[ReuseReport, float]] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            response = event.response  # of a stream the last one, which has both
            assert response is not None and response.raw is not None
            report = ReuseReport.from_mapping(response.additional_kwargs["semkv"])
            self.calls.append((report, response.raw["ttft_ms"]))

    def take(self) -> tuple[ReuseReport, float]:
        """The first call's report and time to first token since the last `take`."""
        first = self.calls[0]
        self.calls.clear()
        return first


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    own_docs = options.docs.resolve() != CORPUS
    own_model = Path(options.model).resolve() != READER
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TQDM_DISABLE", "1")
    questions = _questions(options.questions or options.docs / "questions.json")
    console.print(f"Starting vLLM with {options.model} …")
    engine_args: dict[str, Any] = {} if own_model else READER_ENGINE
    with Engine(options.model, store=options.store, **engine_args) as engine:
        if not engine.gate.servable:
            console.print(f"[yellow]Answered without reuse: {engine.gate.reason}")
        chunk_tokens = 256 if own_docs else 32
        _precompute(engine, options.docs, chunk_tokens)
        Settings.tokenizer = engine.tokenizer.encode
        nodes = make_nodes(options.docs, engine.tokenizer, chunk_tokens)
        retriever, postprocessors = make_retriever(
            nodes, options.top_k, neighbours=options.neighbours
        )

        def query_engine(**settings: Any) -> BaseQueryEngine:
            return RetrieverQueryEngine.from_args(
                retriever,
                llm=SemKV(engine=engine, max_tokens=MAX_TOKENS, **settings),
                node_postprocessors=postprocessors,
                response_mode=ResponseMode.COMPACT,
                streaming=True,  # else nobody sees when the first token comes
                text_qa_template=None if own_model else READER_TEMPLATE,
            )

        modes = {
            BLEND: query_engine(ratio=options.ratio),
            REUSE_ONLY: query_engine(selector="none"),
            PLAIN: query_engine(reuse=False),
        }
        _warm_up(engine, [node.text for node in nodes])
        results = list(_ask(engine, modes, questions[: options.limit]))
    figures = _figures(results, options)
    _print_summary(figures)
    if not own_model:
        console.print(
            "[dim]The reader has 4 million parameters: its whole prefill takes less than a blend's fixed "
            "costs. `benchmarks/ttft.py` has the times of a model with 24 layers."
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    console.print(f"Figures: {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Questions about documents, with their KV reused.")
    parser.add_argument("--model", default=str(READER), help="a folder or a hub name, as for vLLM")
    parser.add_argument("--docs", type=Path, default=CORPUS, help="a folder of documents")
    parser.add_argument(
        "--questions",
        type=Path,
        help='a JSON list of {"question": …, "answer": …}, the answer may be missing; '
        "questions.json in the documents' folder when left out",
    )
    parser.add_argument("--top-k", type=int, default=TOP_K, help="chunks that are retrieved")
    parser.add_argument(
        "--neighbours", type=int, default=2, help="chunks that each brings along on both sides"
    )
    parser.add_argument("--store", type=Path, default=BUILD / "demo-store")
    parser.add_argument("--limit", type=int, help="at most so many questions")
    parser.add_argument("--ratio", type=float, default=ReuseOptions().ratio)
    parser.add_argument("--out", type=Path, default=BUILD / "demo.json")
    return parser


def _questions(file: Path) -> list[Question]:
    if not file.exists():
        return [Question(text) for text in GENERIC_QUESTIONS]
    entries = json.loads(file.read_text(encoding="utf-8"))
    return [
        Question(entry["question"], entry.get("answer"), tuple(entry.get("also", ())))
        for entry in entries
    ]


def _precompute(engine: Engine, docs: Path, chunk_tokens: int) -> None:
    with console.status("Precomputing …"):
        result = precompute(engine, [docs], chunk_tokens=chunk_tokens, sync=True)
    console.print(
        f"{result.documents} documents: {result.unchanged} found precomputed, "
        f"{result.chunks_captured} chunks ({result.tokens:,} tokens) computed "
        f"in {result.seconds:.1f} s"
    )
    for failure in result.failures:
        console.print(f"[yellow]{failure.source}: {failure.reason}")


def _warm_up(engine: Engine, texts: Sequence[str]) -> None:
    """A blended and a plain prompt that no question makes: chunks in the reverse order."""
    prompt = " ".join(reversed(texts[: TOP_K * 2]))
    for enabled in (True, False):
        engine.generate(prompt, sampling={"max_tokens": 1}, reuse=ReuseOptions(enabled=enabled))


def _ask(
    engine: Engine, modes: dict[str, BaseQueryEngine], questions: Iterable[Question]
) -> Iterable[Result]:
    calls = ModelCalls()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(calls)
    for question in questions:
        result = Result(question)
        for mode, query_engine in modes.items():
            engine.reset_prefix_cache()
            text = str(query_engine.query(question.text)).strip()
            result.replies[mode] = Reply(text, *calls.take())
        _print_result(result)
        yield result
    dispatcher.event_handlers.remove(calls)


def _print_result(result: Result) -> None:
    blend, plain = result.replies[BLEND], result.replies[PLAIN]
    report = blend.report
    known = result.question.answer is not None

    def mark(mode: str) -> str:
        if not known:
            return ""
        return " [green]✓[/]" if result.is_right(mode) else " [red]✗[/]"

    console.print(f"[bold]{escape(result.question.text)}[/]")
    console.print(
        f"  with reuse: {escape(blend.text)}{mark(BLEND)}"
        f"   plain vLLM: {escape(plain.text)}{mark(PLAIN)}"
        + (f"   right: {escape(result.question.answer or '')}" if known else "")
    )
    cached = f", {report.cached_tokens} cached by vLLM" if report.cached_tokens else ""
    console.print(
        f"  [dim]{report.prompt_tokens} tokens: {report.exact_tokens + report.reused_tokens} reused, "
        f"{report.recomputed_tokens} of them recomputed{cached}; first token after "
        f"{blend.ttft_ms:.0f} ms with reuse, {plain.ttft_ms:.0f} ms plain"
        + (f"; {report.reason}" if report.reason else "")
    )


def _figures(results: Sequence[Result], options: argparse.Namespace) -> dict[str, Any]:
    """What `build/demo.json` says.

    `reused_share` is of the prompts' tokens, `recomputed_share` of the reused ones, `ttft_ratio`
    the median over questions of blended over plain: below 1 is faster.
    """
    known = [result for result in results if result.question.answer is not None]
    reports = [result.replies[BLEND].report for result in results]
    reused = sum(report.exact_tokens + report.reused_tokens for report in reports)

    def accuracy(mode: str) -> float | None:
        return _share(sum(result.is_right(mode) for result in known), len(known))

    def ttft(mode: str) -> float | None:
        return _median([result.replies[mode].ttft_ms for result in results])

    return {
        "model": options.model,
        "ratio": options.ratio,
        "selector": ReuseOptions().selector,
        "questions": len(results),
        "plain_accuracy": accuracy(PLAIN),
        "blend_accuracy": accuracy(BLEND),
        "reuse_only_accuracy": accuracy(REUSE_ONLY),
        "reused_share": _share(reused, sum(report.prompt_tokens for report in reports)),
        "recomputed_share": _share(sum(r.recomputed_tokens for r in reports), reused),
        "plain_ttft_ms": ttft(PLAIN),
        "blend_ttft_ms": ttft(BLEND),
        "reuse_only_ttft_ms": ttft(REUSE_ONLY),
        "ttft_ratio": _median(
            [result.replies[BLEND].ttft_ms / result.replies[PLAIN].ttft_ms for result in results]
        ),
        "not_reused": [
            {"question": result.question.text, "reason": result.replies[BLEND].report.reason}
            for result in results
            if result.replies[BLEND].report.kv_cache != "hit"
        ],
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _print_summary(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['questions']} questions, one engine")
    table.add_column("")
    for title in ("plain vLLM", f"blended, {figures['ratio']:.0%}", "reuse, no recompute"):
        table.add_column(title, justify="right")
    order = (PLAIN, BLEND, REUSE_ONLY)
    if figures["plain_accuracy"] is not None:
        table.add_row("right answers", *(f"{figures[f'{m}_accuracy']:.1%}" for m in order))
    table.add_row(
        "median time to first token", *(f"{figures[f'{m}_ttft_ms']:.0f} ms" for m in order)
    )
    table.add_row("prompt tokens reused", "–", f"{figures['reused_share']:.1%}", "")
    table.add_row("of them recomputed", "–", f"{figures['recomputed_share']:.1%}", "0 %")
    console.print(table)


if __name__ == "__main__":
    main()
