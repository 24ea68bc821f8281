"""One context: a task as a prompt, full prefill's KV and answer, and answers over other KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality_real.network import Cache, Network
from benchmarks.quality_real.outcome import Outcome
from benchmarks.quality_real.shelf import Made, Shelf
from benchmarks.quality_real.tasks import Task
from semkv_rag.reuse.question import MOST

INSTRUCTION = "Answer the question by the passages, in as few words as you can.\n\n"
SEPARATOR = "\n\n"
MAX_ANSWER = 24


def around_passages(tokenizer: Any) -> tuple[str, str]:
    """What of a prompt stands before its passages, and what behind its question."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": INSTRUCTION + "\x00"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = text.split("\x00")
    return before, after


@dataclass
class _Open:
    """An answer that is not decoded to its end yet."""

    answer: list[int]
    cache: Cache
    outcome: Any = None


class Context:
    """A task as a prompt, with full prefill's KV and answer.

    Args:
        question_tokens: of the question, so many at most are asked with.
    """

    def __init__(
        self, network: Network, task: Task, shelf: Shelf, question_tokens: int = MOST
    ) -> None:
        self.network, self.task, self._shelf = network, task, shelf
        self.open: list[_Open] = []
        tokenizer = network.tokenizer
        before, after = around_passages(tokenizer)
        encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
        self.prefix: list[int] = encode(before)
        self.question: list[int] = encode(f"\n\nQuestion: {task.question}\nAnswer:{after}")
        self.asked = self.question[-question_tokens:]
        self.bare: list[int] = encode(before + f"Question: {task.question}\nAnswer:{after}")
        separator = encode(SEPARATOR)
        tokens, spans = list(self.prefix), []
        for number, one in enumerate(task.passages):
            tokens += separator if number else []
            spans.append((len(tokens), len(tokens) + len(one.tokens)))
            tokens += one.tokens
        self.tokens = tokens
        self.spans = spans
        self.end = len(tokens)
        reused = torch.zeros(self.end, dtype=torch.bool)
        self.rank = torch.zeros(self.end, dtype=torch.int64)
        for first, end in spans:
            reused[first:end] = True
            self.rank[first:end] = torch.arange(end - first)
        self.reused = reused
        # With one question all is one pass, as in the engine; with several the passages' is kept.
        whole, done = tokens + self.question, self.end if shelf.shared else 0
        if shelf.shared:
            full = self.room_behind(self.once("full", lambda: network.prefill(tokens)))
        else:
            full = network.cache(len(whole) + MAX_ANSWER + 1)
        self.full = full
        hidden = network.run(network.embed(whole[done:]), torch.arange(done, len(whole)), full)
        self.answer, self.full_log = self._decode(full, network.logits(hidden[-1:]), len(whole))
        self.full_text = tokenizer.decode(self.answer, skip_special_tokens=True)

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What does not depend on the question, made once for all questions on these passages."""
        return self._shelf.once(tuple(self.tokens), name, make)

    def room_behind(self, cache: Cache) -> Cache:
        """A prompt's cache with empty places for question and answer."""
        return cache.joined(self.network.cache(len(self.question) + MAX_ANSWER + 1))

    def bare_text(self) -> str:
        """The answer without any passage."""
        whole = self.bare
        cache = self.network.cache(len(whole) + MAX_ANSWER + 1)
        hidden = self.network.run(self.network.embed(whole), torch.arange(len(whole)), cache)
        answer, _ = self._decode(cache, self.network.logits(hidden[-1:]), len(whole))
        text: str = self.network.tokenizer.decode(answer, skip_special_tokens=True)
        return text

    def _decode(self, cache: Cache, logits: Tensor, place: int) -> tuple[list[int], Tensor]:
        """Greedy from `logits` on, the first token at `place`: tokens, and [tokens, words] of logs."""
        answer, logs = [], []
        while True:
            logs.append(logits.log_softmax(-1))
            answer.append(int(logits.argmax()))
            if answer[-1] in self.network.ends or len(answer) >= MAX_ANSWER:
                return answer, torch.cat(logs)
            hidden = self.network.run(
                self.network.embed(answer[-1:]), torch.tensor([place + len(answer) - 1]), cache
            )
            logits = self.network.logits(hidden)

    def stored(self, how: str) -> Cache:
        """The prompt's cache with each chunk as it is stored; the rest is full prefill's.

        The prefix is exact. What stands between chunks is computed later, over the stored.
        """
        result = self.full.clone()
        for (first, end), one in zip(self.spans, self.task.passages, strict=True):
            left = () if how == "prefix" else tuple(one.left) or self._shelf.passage
            kv = self._shelf.chunk(tuple(self.prefix), left, tuple(one.tokens))
            base = len(self.prefix) + len(left)
            result.keys[:, :, first:end] = self.network.moved(kv.keys, first - base)
            result.values[:, :, first:end] = kv.values
        return result

    def answered(self, cache: Cache, charged: float) -> Outcome:
        """The question over a blended cache, with full prefill's answer handed to it."""
        network = self.network
        start = self.end
        rows = self.question + self.answer[:-1]
        hidden = network.run(network.embed(rows), torch.arange(start, start + len(rows)), cache)
        first = len(self.question) - 1
        logs = network.logits(hidden[first:]).log_softmax(-1)
        each = (self.full_log.exp() * (self.full_log - logs)).sum(-1)
        entropies = -(logs.exp() * logs).sum(-1)
        likeliest = logs.argmax(-1)
        same = likeliest == torch.tensor(self.answer)
        if bool(same.all()):
            text = self.full_text
        else:
            at = int((~same).nonzero()[0])
            text = ""
            # Decoded on together with the other ways' answers: a step's time is that of reading weights.
            self.open.append(_Open([*self.answer[:at], int(likeliest[at])], cache))
        outcome = Outcome(
            kl=float(each.mean()),
            worst_kl=float(each.max()),
            equal=float(same.float().mean()),
            score=self.task.score(text),
            same=bool(same.all()),
            charged=charged,
            text=text,
            risk={"entropy": float(entropies[0]), "entropies": float(entropies.mean())},
        )
        if not outcome.same:
            self.open[-1].outcome = outcome
        return outcome

    def finish(self) -> None:
        """Decode the answers that differ from full prefill's to their ends."""
        network, start = self.network, self.end + len(self.question)
        while going := [
            one
            for one in self.open
            if one.answer[-1] not in network.ends and len(one.answer) < MAX_ANSWER
        ]:
            logits = network.step(
                [one.answer[-1] for one in going],
                [start + len(one.answer) - 1 for one in going],
                [one.cache for one in going],
            )
            for one, row in zip(going, logits, strict=True):
                one.answer.append(int(row.argmax()))
        for one in self.open:
            one.outcome.text = network.tokenizer.decode(one.answer, skip_special_tokens=True)
            one.outcome.score = self.task.score(one.outcome.text)
        self.open.clear()
