"""One pass over the questions, in a process with an engine of its own.

A new process for each pass is the point: nothing is left of the one before but the store.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from semkv_rag.errors import EngineError, OptionError, SemKVError
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.vqa.data import Sample
from workbench.vqa.tower import tower_calls, watch_tower

if TYPE_CHECKING:
    from semkv_rag.engine import Engine

LOGPROBS = 5
QUESTION = "{question}"
WARM_UP = "warm-up"  # the namespace of requests that are not measured


@dataclass(frozen=True)
class Pass:
    """What one pass asks, and of what.

    Attributes:
        name: by which it is told.
        samples: in the order in which they are asked, one at a time.
        template: a prompt with `{question}` and the model's own placeholder of an image; the model's
            chat template where it is None.
        store: the store's folder; None for plain vLLM, whose prefix cache is off then.
        prompt_cache: None for plain vLLM.
        encoders: names, by layer.
        tower: the vision tower's name in the model, where it is not found.
    """

    name: str
    model: str
    engine_args: Mapping[str, Any]
    samples: tuple[Sample, ...]
    max_tokens: int
    template: str | None = None
    store: Path | None = None
    prompt_cache: PromptCacheOptions | None = None
    encoders: Mapping[str, str] = field(default_factory=dict)
    tower: str | None = None


@dataclass(frozen=True)
class Row:
    """What became of one question.

    Attributes:
        tokens: the answer's.
        logprobs: of each of its tokens, the likeliest tokens' by token.
        tower_calls: forward calls of the vision tower while it was answered.
        report: of the request, `ReuseReport.to_mapping`.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    latency_s: float
    ttft_s: float
    tower_calls: int
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What is said of an engine once.

    Attributes:
        architecture: of the model.
        tower: the path of the module whose calls are counted.
        stored_prompts, prompts_bytes: what the store holds at the end.
        stored_images, images_bytes: features of images, likewise.
    """

    architecture: str
    tower: str
    stored_prompts: int = 0
    prompts_bytes: int = 0
    stored_images: int = 0
    images_bytes: int = 0


def run(work: Pass) -> Iterator[Row | Facts]:
    """The rows of the samples as they come; the facts last.

    Raises:
        SemKVError: the engine could not be started, or an option cannot be used.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(work, sending), name=f"vqa-{work.name}")
    process.start()
    sending.close()
    try:
        while True:
            try:
                told = receiving.recv()
            except EOFError:
                process.join()
                raise EngineError(f"the pass {work.name!r} ended with {process.exitcode}") from None
            if isinstance(told, SemKVError):
                raise told
            yield told
            if isinstance(told, Facts):
                return
    finally:
        receiving.close()
        process.join(timeout=60)
        if process.is_alive():
            process.terminate()
            process.join()


def _serve(work: Pass, sending: Connection) -> None:
    """The process of a pass."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the hook is sent to the worker
    try:
        for told in _passed(work):
            sending.send(told)
    except SemKVError as error:
        sending.send(error if isinstance(error, OptionError) else EngineError(str(error)))
    except BrokenPipeError:
        pass
    except Exception:
        sending.send(EngineError(f"the pass {work.name!r} failed:\n{traceback.format_exc()}"))


def _passed(work: Pass) -> Iterator[Row | Facts]:
    from semkv_rag.engine import Engine
    from semkv_rag.prompt_cache.named import encoders_of
    from workbench.inside import inside

    arguments = dict(work.engine_args)
    if work.store is None:
        arguments.setdefault("enable_prefix_caching", False)
    with Engine(
        work.model,
        store=work.store,
        prompt_cache=work.prompt_cache,
        encoders=encoders_of(work.encoders) if work.prompt_cache is not None else None,
        **arguments,
    ) as engine:
        if not engine.supports_images:
            raise OptionError(f"{work.model} takes no images: give a vision-language model")
        if work.store is not None and not engine.gate.servable:
            raise OptionError(
                f"{work.model} cannot be served with reuse: {engine.gate.reason}. There is nothing"
                " to measure"
            )
        tower = inside(engine, partial(watch_tower, name=work.tower))
        if not tower:
            raise OptionError("the vision tower was not found: name its module by --vision-tower")
        prompts = _Prompts(engine, work.template)
        _ask(engine, prompts, work, work.samples[0], WARM_UP)
        for sample in work.samples:
            yield _ask(engine, prompts, work, sample)
        yield _facts(engine, tower)


def _ask(
    engine: Engine, prompts: _Prompts, work: Pass, sample: Sample, namespace: str = "default"
) -> Row:
    from semkv_rag.config import ReuseOptions
    from workbench.inside import inside

    with Image.open(sample.image) as file:
        image = file.convert("RGB")
    if namespace == WARM_UP:
        image = Image.new("RGB", image.size, (127, 127, 127))
    before = inside(engine, tower_calls)
    answer = engine.generate(
        {"prompt": prompts.of(sample), "multi_modal_data": {"image": image}},
        sampling={"temperature": 0.0, "max_tokens": work.max_tokens, "logprobs": LOGPROBS},
        reuse=ReuseOptions(namespace=namespace),
    )
    calls = inside(engine, tower_calls) - before
    assert engine._llm is not None
    if engine._llm.prompt_lookup is not None:  # the next question finds this one stored
        engine._llm.prompt_lookup.settle()
    return Row(
        id=sample.id,
        text=answer.text,
        tokens=answer.token_ids,
        logprobs=answer.logprobs or (),
        latency_s=answer.latency_ms / 1000,
        ttft_s=answer.ttft_ms / 1000,
        tower_calls=calls,
        report=answer.report.to_mapping(),
    )


def _facts(engine: Engine, tower: str) -> Facts:
    assert engine._llm is not None
    architecture = engine._llm.model_config.architecture
    if engine.store is None:
        return Facts(architecture, tower)
    prompts = [one for one in engine.store.chunks(namespace="default") if one.kind == "prompt"]
    states = list(engine.store.states.records(namespace="default"))
    return Facts(
        architecture,
        tower,
        stored_prompts=len(prompts),
        prompts_bytes=sum(record.bytes for record in prompts),
        stored_images=len(states),
        images_bytes=sum(record.bytes for record in states),
    )


class _Prompts:
    """Puts questions into the model's prompt."""

    def __init__(self, engine: Engine, template: str | None) -> None:
        self._template = template
        if template is None:
            from transformers import AutoProcessor

            trusted = engine._llm is not None and engine._llm.model_config.trust_remote_code
            self._processor = AutoProcessor.from_pretrained(engine.model, trust_remote_code=trusted)
            if getattr(self._processor, "chat_template", None) is None:
                raise OptionError(
                    f"{engine.model} has no chat template: give --prompt-template, with {QUESTION}"
                    " and the model's placeholder of an image"
                )
            # vLLM puts it before the text again.
            first = engine.tokenizer.bos_token
            ids = engine.tokenizer("").input_ids
            self._cut = first if first and ids[:1] == [engine.tokenizer.bos_token_id] else ""

    def of(self, sample: Sample) -> str:
        if self._template is not None:
            return sample.prefix + self._template.replace(QUESTION, sample.question)
        content = [{"type": "image"}, {"type": "text", "text": sample.question}]
        if sample.prefix:
            content.insert(0, {"type": "text", "text": sample.prefix})
        text: str = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return text.removeprefix(self._cut)
