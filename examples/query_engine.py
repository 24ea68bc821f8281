"""A LlamaIndex query engine whose prompts take the KV of their chunks out of a store, beside plain vLLM.

    python examples/query_engine.py                                  # `make demo`: SmolLM2 on 61 articles
    python examples/query_engine.py --model Qwen/Qwen3-8B --docs ~/manuals --questions asked.json
    python examples/query_engine.py --model examples/reader --docs examples/corpus

The documents' KV is precomputed (the second run finds it), then each question is answered several times
by one engine: by plain vLLM, by the presets, and with the stored KV as it is (selector `none`). Prints
the answers, and leaves the figures in `build/demo.json` and a plot in `build/demo.png`.

The first questions are asked one at a time: times to the first token are theirs. The others are asked
many at a time. vLLM's own prefix cache is emptied before each, so that the ways to get a prompt's KV
are compared: computing it, and taking it out of the store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.llms.semkv import SemKV
from retrieval import make_nodes, make_retriever
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoTokenizer

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import PrecomputeProgress, precompute
from semkv_rag.engine import Engine
from semkv_rag.engine.cpu_dtype import fast_dtype
from semkv_rag.report import ReuseReport

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
MODEL = BUILD / "smollm2"
DOCS = HERE / "articles"
READER = HERE / "reader"

TEMPLATE = PromptTemplate(
    "Answer the question by the passages, in as few words as you can.\n\n"
    "{context_str}\n\n"
    "Question: {query_str}\n"
    "Answer:"
)

GENERIC_QUESTIONS = (
    "What are these documents about?",
    "Which people and organisations are named, and what is said of them?",
    "Which dates and numbers are given, and what for?",
)
MAX_TOKENS = 24
TIMED = 12
"""Questions that are asked one at a time."""
AT_ONCE = 36
"""Of the others: a step of decoding costs little more for many answers than for one."""

PLAIN = "plain"


@dataclass(frozen=True)
class Setup:
    """What suits a model: how its documents are cut and found, and the ways its questions are answered.

    Attributes:
        top_k: chunks that are retrieved.
        neighbours: chunks that each hit brings along on both sides, in the order of their document.
        ways: options of `SemKV` by the name of the way.
    """

    template: PromptTemplate
    chunk_tokens: int
    top_k: int
    neighbours: int
    ways: dict[str, dict[str, Any]]
    engine: dict[str, Any]


USUAL = Setup(
    template=TEMPLATE,
    chunk_tokens=256,
    top_k=5,
    neighbours=0,
    ways={
        PLAIN: {"reuse": False},
        "exact": {"preset": "exact"},
        "balanced": {"preset": "balanced"},
        "fast": {"preset": "fast"},
        "as stored": {"selector": "none"},
    },
    engine={"dtype": fast_dtype(), "kv_cache_memory_bytes": 1 << 30},
)
# A model of six layers that was trained for this repository's tests. It knows one form of prompt, and
# binds what crosses chunks in its first two layers, which this selector computes for all tokens.
READERS = Setup(
    template=PromptTemplate("{context_str} Question : {query_str} Answer :"),
    chunk_tokens=32,
    top_k=4,
    neighbours=2,
    ways={
        PLAIN: {"reuse": False},
        "blended": {"selector": "kv_deviation"},
        "as stored": {"selector": "none"},
    },
    engine={"dtype": "float32", "kv_cache_memory_bytes": 1 << 30},
)

console = Console()


@dataclass(frozen=True)
class Index:
    """The chunks' texts, and what finds them."""

    texts: list[str]
    retriever: BaseRetriever
    postprocessors: list[BaseNodePostprocessor]


@dataclass(frozen=True)
class Question:
    text: str
    answer: str | None = None  # None: not known, so nothing is said about right and wrong
    also: tuple[str, ...] = ()  # other ways to say it


@dataclass(frozen=True)
class Reply:
    """One answer, with what its first call of the model reports: the only one but for long contexts.

    Attributes:
        ttft_ms: None where others were asked at the same time.
    """

    text: str
    report: ReuseReport
    ttft_ms: float | None


@dataclass
class Result:
    """A question and its answers by mode."""

    question: Question
    replies: dict[str, Reply] = field(default_factory=dict)

    def is_right(self, mode: str) -> bool:
        said = self.replies[mode].text
        answers = (self.question.answer or "", *self.question.also)
        return any(re.search(rf"\b{re.escape(one)}\b", said, re.I) for one in answers)


Call: TypeAlias = tuple[ReuseReport, float]
"""What a call of the model reports, and its time to the first token in ms."""

calls_of_question: ContextVar[list[Call]] = ContextVar("calls_of_question")


class ModelCalls(BaseEventHandler):
    """Collects what the model says of each call; query engines pass on nothing but the text."""

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            response = event.response  # of a stream the last one, which has both
            assert response is not None and response.raw is not None
            report = ReuseReport.from_mapping(response.additional_kwargs["semkv"])
            calls_of_question.get().append((report, response.raw["ttft_ms"]))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if not Path(options.model).exists() and Path(options.model) == MODEL:
        raise SystemExit(f"{MODEL} is not there: make model")
    if not options.docs.is_dir():
        raise SystemExit(f"{options.docs} is not a folder: name one with documents by --docs")
    setup = READERS if Path(options.model).resolve() == READER else USUAL
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TQDM_DISABLE", "1")
    questions = _questions(options.questions or options.docs / "questions.json")[: options.limit]
    console.print(f"Starting vLLM with {options.model} …")
    with ThreadPoolExecutor(1) as thread:
        # Beside vLLM's start, which takes one core.
        indexing = thread.submit(_index, setup, options)
        engine = Engine(options.model, store=options.store, **setup.engine)
    with engine:
        if not engine.gate.servable:
            console.print(f"[yellow]Answered without reuse: {engine.gate.reason}")
        index = indexing.result()
        query_engines = _query_engines(engine, setup, index)
        _precompute(engine, setup, options.docs)
        _warm_up(engine, index.texts)
        results = list(_ask(engine, query_engines, questions))
    figures = _figures(results, list(setup.ways), options)
    _print_summary(figures)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    _plot(figures, options.out.with_suffix(".png"))
    console.print(f"Figures: {options.out}, plot: {options.out.with_suffix('.png')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Questions about documents, with their KV reused.")
    parser.add_argument("--model", default=str(MODEL), help="a folder or a hub name, as for vLLM")
    parser.add_argument("--docs", type=Path, default=DOCS, help="a folder of documents")
    parser.add_argument(
        "--questions",
        type=Path,
        help='a JSON list of {"question": …, "answer": …}, the answer may be missing; '
        "questions.json in the documents' folder when left out",
    )
    parser.add_argument(
        "--top-k", type=int, help="chunks that are retrieved; what suits the model, if left out"
    )
    parser.add_argument("--store", type=Path, default=BUILD / "demo-store")
    parser.add_argument("--limit", type=int, default=120, help="at most so many questions")
    parser.add_argument("--out", type=Path, default=BUILD / "demo.json")
    return parser


def _index(setup: Setup, options: argparse.Namespace) -> Index:
    """The documents' chunks, cut as precompute cuts them, and embedded."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    Settings.tokenizer = tokenizer.encode
    nodes = make_nodes(options.docs, tokenizer, setup.chunk_tokens)
    if not nodes:
        raise SystemExit(f"{options.docs}: no document holds any text")
    found = make_retriever(nodes, options.top_k or setup.top_k, setup.neighbours)
    return Index([node.text for node in nodes], *found)


def _query_engines(engine: Engine, setup: Setup, index: Index) -> dict[str, BaseQueryEngine]:
    """A query engine for each way."""

    def query_engine(**settings: Any) -> BaseQueryEngine:
        return RetrieverQueryEngine.from_args(
            index.retriever,
            llm=SemKV(engine=engine, max_tokens=MAX_TOKENS, **settings),
            node_postprocessors=index.postprocessors,
            response_mode=ResponseMode.COMPACT,
            streaming=True,  # else nobody sees when the first token comes
            text_qa_template=setup.template,
        )

    return {way: query_engine(**settings) for way, settings in setup.ways.items()}


def _questions(file: Path) -> list[Question]:
    if not file.exists():
        return [Question(text) for text in GENERIC_QUESTIONS]
    entries = json.loads(file.read_text(encoding="utf-8"))
    return [
        Question(entry["question"], entry.get("answer"), tuple(entry.get("also", ())))
        for entry in entries
    ]


def _precompute(engine: Engine, setup: Setup, docs: Path) -> None:
    # What every prompt begins with: the chat template's first tokens, and the question's template.
    prefix = SemKV(engine=engine).prefix_of(setup.template)
    with console.status("Precomputing …") as status:

        def told(progress: PrecomputeProgress) -> None:
            status.update(f"Precomputing: {progress.share:.0%}, {progress.chunks} chunks")

        result = precompute(
            engine,
            [docs],
            chunk_tokens=setup.chunk_tokens,
            prefix=prefix,
            sync=True,
            on_progress=told,
        )
    console.print(
        f"{result.documents} documents: {result.unchanged} found precomputed, "
        f"{result.chunks_captured} chunks ({result.tokens:,} tokens) computed "
        f"in {result.seconds:.1f} s"
    )
    for failure in result.failures:
        console.print(f"[yellow]{failure.source}: {failure.reason}")


def _warm_up(engine: Engine, texts: Sequence[str]) -> None:
    """A blended and a plain prompt that no question makes: chunks in the reverse order."""
    prompt = " ".join(reversed(texts[:8]))
    for enabled in (True, False):
        engine.generate(prompt, sampling={"max_tokens": 1}, reuse=ReuseOptions(enabled=enabled))


def _ask(
    engine: Engine, query_engines: dict[str, BaseQueryEngine], questions: Sequence[Question]
) -> Iterator[Result]:
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler := ModelCalls())
    batches = [[one] for one in questions[:TIMED]]
    rest = questions[TIMED:]
    batches += [list(rest[at : at + AT_ONCE]) for at in range(0, len(rest), AT_ONCE)]
    number = 0
    for batch in batches:
        results = [Result(question) for question in batch]
        for way, query_engine in query_engines.items():
            engine.reset_prefix_cache()
            replies = asyncio.run(_answers(query_engine, batch))
            for result, reply in zip(results, replies, strict=True):
                result.replies[way] = reply
        for result in results:
            number += 1
            console.print(f"[bold]{number}/{len(questions)} {escape(result.question.text)}[/]")
            _print_result(result)
        yield from results
    dispatcher.event_handlers.remove(handler)


async def _answers(query_engine: BaseQueryEngine, batch: Sequence[Question]) -> list[Reply]:
    """The answers to questions that are asked at the same time."""

    async def answer(question: Question) -> Reply:
        calls: list[Call] = []
        calls_of_question.set(calls)
        streamed = await query_engine.aquery(question.text)
        assert isinstance(streamed, AsyncStreamingResponse)
        text = str(await streamed.get_response()).strip()
        report, ttft_ms = calls[0]
        return Reply(text, report, ttft_ms if len(batch) == 1 else None)

    return await asyncio.gather(*map(answer, batch))


def _print_result(result: Result) -> None:
    """The answers, each with the ways that gave it."""
    known = result.question.answer is not None
    by_text: dict[str, list[str]] = {}
    for way, reply in result.replies.items():
        by_text.setdefault(" ".join(reply.text.split()), []).append(way)
    for text, ways in by_text.items():
        mark = ""
        if known:
            mark = "[green]✓[/] " if result.is_right(ways[0]) else "[red]✗[/] "
        console.print(f"  {mark}{escape(text)}  [dim]{', '.join(ways)}[/]")
    known_answer = f"right: {escape(result.question.answer or '')}; " if known else ""
    times = ", ".join(
        f"{way} {reply.ttft_ms:.0f}"
        for way, reply in result.replies.items()
        if reply.ttft_ms is not None
    )
    told = f"; first token in ms: {times}" if times else ""
    tokens = result.replies[PLAIN].report.prompt_tokens
    console.print(f"  [dim]{known_answer}{tokens} tokens{told}[/]")


def _figures(
    results: Sequence[Result], ways: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """What `build/demo.json` says.

    Of each way: `right`, the share of the questions with a known answer that it answers right;
    `as_plain`, the share of answers that are plain vLLM's word for word; `ttft_ms` and `sooner`, medians
    over the `timed` questions that were asked alone, the latter of plain's time over this way's, question
    by question; `reused` of the prompts' tokens, `recomputed` of the reused ones.
    """
    known = [result for result in results if result.question.answer is not None]
    lines = []
    for way in ways:
        replies = [result.replies[way] for result in results]
        plain = [result.replies[PLAIN] for result in results]
        reused = sum(one.report.exact_tokens + one.report.reused_tokens for one in replies)
        lines.append(
            {
                "way": way,
                "right": _share(sum(result.is_right(way) for result in known), len(known)),
                "as_plain": _share(
                    sum(a.text == b.text for a, b in zip(replies, plain, strict=True)), len(results)
                ),
                "ttft_ms": _median([one.ttft_ms for one in replies if one.ttft_ms is not None]),
                "sooner": _median(
                    [
                        b.ttft_ms / a.ttft_ms
                        for a, b in zip(replies, plain, strict=True)
                        if a.ttft_ms is not None and b.ttft_ms is not None
                    ]
                ),
                "reused": _share(reused, sum(one.report.prompt_tokens for one in replies)),
                "recomputed": _share(sum(one.report.recomputed_tokens for one in replies), reused),
                "not_reused": [
                    {"question": result.question.text, "reason": result.replies[way].report.reason}
                    for result in results
                    if way != PLAIN and result.replies[way].report.kv_cache != "hit"
                ],
            }
        )
    prompts = [result.replies[PLAIN].report.prompt_tokens for result in results]
    return {
        "model": options.model,
        "questions": len(results),
        "timed": sum(result.replies[PLAIN].ttft_ms is not None for result in results),
        "prompt_tokens": _median(prompts),
        "ways": lines,
        "answers": [
            {
                "question": result.question.text,
                "right": result.question.answer,
                **{way: result.replies[way].text for way in ways},
            }
            for result in results
        ],
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _print_summary(figures: dict[str, Any]) -> None:
    table = Table(
        title=f"{figures['questions']} questions, prompts of {figures['prompt_tokens']:.0f} tokens"
    )
    table.add_column("")
    for title in (
        "right",
        "as plain's",
        "first token",
        "sooner",
        "reused",
        "recomputed",
    ):
        table.add_column(title, justify="right")
    percent = lambda share: "–" if share is None else f"{share:.1%}"  # noqa: E731
    for line in figures["ways"]:
        table.add_row(
            line["way"],
            percent(line["right"]),
            percent(line["as_plain"]),
            f"{line['ttft_ms']:.0f} ms",
            f"{line['sooner']:.1f} x",
            percent(line["reused"]),
            percent(line["recomputed"]),
        )
    console.print(table)


def _plot(figures: dict[str, Any], file: Path) -> None:
    """How soon and how right each way answers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for line in figures["ways"]:
        share = line["as_plain"] if line["right"] is None else line["right"]
        axis.scatter(line["ttft_ms"], 100 * share)
        axis.annotate(f" {line['way']}", (line["ttft_ms"], 100 * share))
    known = figures["ways"][0]["right"] is not None
    axis.set(
        xlabel="median time to first token, ms",
        ylabel="right answers, %" if known else "answers as plain's, %",
        title=f"{figures['questions']} questions, {Path(figures['model']).name}",
    )
    axis.set_xlim(left=0)
    figure.savefig(file)


if __name__ == "__main__":
    main()
