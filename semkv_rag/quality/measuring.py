"""Asking a model its user's own questions, by full prefill and out of reused KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv_rag.config import PRESETS, ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.quality.answers import exact_match, f1
from semkv_rag.quality.comparing import agreement, first_difference
from semkv_rag.quality.journal import Compared, Journal
from semkv_rag.quality.prompts import Template
from semkv_rag.quality.questions import Question
from semkv_rag.quality.recommending import TARGET, recommend, unknown
from semkv_rag.quality.result import (
    Answered,
    LeftOut,
    QualityResult,
    Sample,
    full_summary,
    summary,
)
from semkv_rag.quality.retrieval import StoredPassages
from semkv_rag.quality.settings import EXACT, Setting, grid

if TYPE_CHECKING:
    from semkv_rag.engine import Engine, LoRARequest
    from semkv_rag.engine.completion import Completion

TOP = 20
"""How many tokens of each place have their log-probabilities asked for: vLLM's own limit."""
DEFAULT_MAX_TOKENS = 64
DEFAULT_PASSAGES = 3

OnQuestion = Callable[[int, int, str], None]
"""Told the requests done, all of them as far as is known, and the question's name."""


def measure(
    engine: Engine,
    questions: Sequence[Question],
    *,
    settings: Sequence[Setting] | None = None,
    template: Template | None = None,
    passages: int = DEFAULT_PASSAGES,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    target: float = TARGET,
    resume: Path | None = None,
    namespace: str | None = None,
    lora_request: LoRARequest | None = None,
    on_progress: OnQuestion | None = None,
) -> QualityResult:
    """How close a model's answers out of reused KV come to its own by full prefill, and what to set.

    One request at a time. vLLM's prefix cache is emptied before each, so that none is answered by what
    another one left. Ctrl-C ends it with the questions that are done, if any are.

    Args:
        engine: with a store, without tiers, and with nothing else to do meanwhile.
        questions: from `read_questions`, or made by hand.
        settings: what is compared, from `grid`; the preset `exact` is added where it is missing.
        template: makes the prompt of questions that bring none.
        passages: how many stored chunks, each with its neighbours, stand before a question that
            brings neither a prompt nor passages (`retrieval`).
        max_tokens: of an answer.
        target: the share of equal tokens that is close enough.
        resume: a file in which each question is kept once it is done, and from which those that are
            done are taken.
        namespace: where passages are found, of settings that have several (`semkv_rag.quality.codecs`).
        lora_request: as for `Engine.generate`: the model with an adapter is measured.
        on_progress: called before each question and request.

    Raises:
        OptionError: an argument cannot be used; the engine has no store, has tiers, or cannot serve its
            model with reuse; questions bring no passages and there are none in the store.
        EngineError: the engine stopped.
    """
    if engine.store is None:
        raise OptionError("the engine was started without a store: give it one")
    if engine.has_prompt_cache:
        raise OptionError(
            "the engine has a prompt cache, whose answers depend on earlier ones: start one without"
        )
    if not engine.gate.servable:
        raise OptionError(f"this model cannot be served with reuse: {engine.gate.reason}")
    if not questions:
        raise OptionError("there is no question to ask")
    if not 0 < target <= 1:
        raise OptionError(f"target is {target!r}: use a number above 0 and up to 1")
    if type(max_tokens) is not int or max_tokens < 1 or type(passages) is not int or passages < 1:
        raise OptionError("max_tokens and passages: use numbers from 1 up")
    chosen = list(grid(namespace=engine.reuse.namespace) if settings is None else settings)
    if not any(setting.name == EXACT for setting in chosen):
        options = chosen[0].options if chosen else ReuseOptions(namespace=engine.reuse.namespace)
        chosen.append(Setting(EXACT, replace(options, **asdict(PRESETS[EXACT]))))
    model = engine.fingerprint
    if lora_request is not None:
        model = engine.with_adapter(lora_request).fingerprint
    about = {
        "model": model,
        "settings": {setting.name: setting.options.to_mapping() for setting in chosen},
        "max_tokens": max_tokens,
    }
    with Journal(resume, about) as journal:
        run = _Run(
            engine,
            model,
            lora_request,
            chosen,
            template or Template(),
            passages,
            max_tokens,
            journal,
            namespace,
            on_progress,
        )
        return run.measure(questions, target)


class _Run:
    """One measurement."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        lora: LoRARequest | None,
        settings: Sequence[Setting],
        template: Template,
        passages: int,
        max_tokens: int,
        journal: Journal,
        namespace: str | None,
        on_progress: OnQuestion | None,
    ) -> None:
        namespaces = {setting.options.namespace for setting in settings}
        if namespace is None and len(namespaces) > 1:
            raise OptionError(f"the settings have several namespaces: {sorted(namespaces)}")
        self.namespace = namespaces.pop() if namespace is None else namespace
        self._engine = engine
        self._model, self._lora = model, lora
        self._settings = settings
        self._template = template
        self._passages = passages
        self._max_tokens = max_tokens
        self._journal = journal
        self._on_progress = on_progress
        self._interrupted = False
        self._stored: StoredPassages | None = None
        self._not_reused: list[LeftOut] = []
        self._exact_only: list[LeftOut] = []
        self._failed: list[LeftOut] = []
        self._done = 0
        self._total = 0

    def measure(self, questions: Sequence[Question], target: float) -> QualityResult:
        if any(one.prompt is None and not one.passages for one in questions):
            self._stored = self._open_stored()
        self._total = len(questions) * (len(self._settings) + 1)
        compared: list[Compared] = []
        for number, question in enumerate(questions, 1):
            self._done = (number - 1) * (len(self._settings) + 1)
            try:
                one = self._compare(question)
            except OptionError as error:
                self._failed.append(LeftOut(question.name, str(error)))
                continue
            except KeyboardInterrupt:
                if not compared:
                    raise
                self._interrupted = True
                break
            if one is not None:
                compared.append(one)
        else:
            self._done = self._total
            self._report_progress(questions[-1])
        return self._result(questions, compared, target)

    def _result(
        self, questions: Sequence[Question], compared: Sequence[Compared], target: float
    ) -> QualityResult:
        full = lines = recommendation = None
        said: tuple[str, ...] = ()
        samples = {
            setting.name: tuple(one.samples[setting.name] for one in compared)
            for setting in self._settings
        }
        if compared:
            full = full_summary([one.full for one in compared], sum(one.tokens for one in compared))
            lines = [
                summary(setting, setting.name in PRESETS, samples[setting.name])
                for setting in self._settings
            ]
            recommendation = recommend(lines, full, target)
            said = unknown(
                lines, full, max_tokens=self._max_tokens, found_here=self._stored is not None
            )
        return QualityResult(
            model=self._engine.model,
            lora=None if self._lora is None else self._lora.lora_name,
            namespace=self.namespace,
            max_tokens=self._max_tokens,
            full=full,
            lines=tuple(lines or ()),
            not_reused=tuple(self._not_reused),
            exact_only=tuple(self._exact_only),
            failed=tuple(self._failed),
            recommendation=recommendation,
            unknown=said,
            full_answers=tuple(one.full for one in compared),
            samples=samples,
            interrupted=self._interrupted,
        )

    def _compare(self, question: Question) -> Compared | None:
        """The question's answers; None when there is nothing to compare, which is noted."""
        prompt = self._engine.tokens_of(self._prompt(question))
        if (done := self._journal.get(question.name, prompt)) is not None:
            return done
        first, *_ = self._settings
        self._report_progress(question)
        probe = self._ask(prompt, first.options)
        if not probe.report.reused_tokens:
            if probe.report.exact_tokens:
                self._exact_only.append(LeftOut(question.name, "as full prefill, whatever is set"))
            else:
                reason = probe.report.reason or "nothing was reused"
                self._not_reused.append(LeftOut(question.name, reason))
            return None
        self._report_progress(question)
        full = self._ask(prompt, replace(first.options, enabled=False))
        samples = {}
        for setting in self._settings:
            other = probe if setting is first else self._report_and_ask(question, prompt, setting)
            if not other.report.reused_tokens:
                reason = f"{setting.name}: {other.report.reason}"
                self._failed.append(LeftOut(question.name, reason))
                return None
            samples[setting.name] = self._sample(question, prompt, full, other, setting)
        compared = Compared(self._answered(question, full), len(full.token_ids), samples)
        self._journal.add(question.name, prompt, compared)
        return compared

    def _report_and_ask(
        self, question: Question, prompt: Sequence[int], setting: Setting
    ) -> Completion:
        self._report_progress(question)
        return self._ask(prompt, setting.options)

    def _ask(self, prompt: Sequence[int], options: ReuseOptions) -> Completion:
        self._engine.reset_prefix_cache()
        sampling = {"temperature": 0.0, "max_tokens": self._max_tokens, "logprobs": TOP}
        return self._engine.generate(
            prompt, sampling=sampling, reuse=options, lora_request=self._lora
        )

    def _sample(
        self,
        question: Question,
        prompt: Sequence[int],
        full: Completion,
        other: Completion,
        setting: Setting,
    ) -> Sample:
        assert full.logprobs is not None and other.logprobs is not None  # they were asked for
        scored: Sequence[dict[int, float] | None] = ()
        if first_difference(full.token_ids, other.token_ids) is not None:
            # The blended blocks are in the prefix cache: this computes the question and the answer.
            scored = self._engine.score(
                prompt, full.token_ids, top=TOP, reuse=setting.options, lora_request=self._lora
            )
        answer = self._answered(question, other)
        return Sample(
            question=answer.question,
            text=answer.text,
            ttft_ms=answer.ttft_ms,
            exact_match=answer.exact_match,
            f1=answer.f1,
            cut=answer.cut,
            agreement=agreement(
                full.token_ids, full.logprobs, other.token_ids, other.logprobs, scored
            ),
            reused_tokens=other.report.reused_tokens,
            recomputed_tokens=other.report.recomputed_tokens,
            charged_ratio=other.report.charged_ratio,
        )

    def _answered(self, question: Question, answer: Completion) -> Answered:
        known = question.answers
        return Answered(
            question=question.name,
            text=answer.text,
            ttft_ms=round(answer.ttft_ms, 3),
            exact_match=exact_match(answer.text, known) if known else None,
            f1=f1(answer.text, known) if known else None,
            cut=answer.finish_reason == "length",
        )

    def _prompt(self, question: Question) -> Any:
        if question.prompt is not None:
            return question.prompt
        passages: Sequence[Any] = question.passages
        if not passages:
            assert self._stored is not None  # `measure`
            passages = self._stored.find(question.text, self._passages)
        return self._template.prompt(passages, question.text)

    def _open_stored(self) -> StoredPassages:
        store = self._engine.store
        assert store is not None  # `measure`
        stored = StoredPassages.of(store, self._model, self.namespace, self._engine.tokenizer)
        if not len(stored):
            raise OptionError(
                f"the store holds no documents of this model in the namespace {self.namespace}: store "
                "some with semkv precompute, or give prompts or ctxs with the questions"
            )
        return stored

    def _report_progress(self, question: Question) -> None:
        if self._on_progress is not None:
            self._on_progress(self._done, self._total, question.name)
        self._done += 1
