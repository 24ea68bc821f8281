"""vLLM with our connector, all in one process, stepped by hand: who gets tokens in which step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.launch import WORKER, transfer_config
from semkv_rag.store import place_of
from workbench.chunks import random_tokens
from workbench.settings import ENGINE_ARGS, READER

BUDGET = 64
"""Tokens of a step."""
BEFORE = 6
"""Steps before the one with the longest prompt asks."""
FIRST_TOKENS = 5 * BUDGET
OTHERS = {f"other {number}": random_tokens(50 + number, 20) for number in range(3)}
LATE = random_tokens(60, 20)
FIRST = random_tokens(61, FIRST_TOKENS)
ANSWER = {**dict.fromkeys(OTHERS, 40), "late": 40, "first": 10}


class Stepped:
    """An engine and what came out of it.

    Attributes:
        tokens: of each request, so far.
        at: the steps in which it got them.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._step = 0
        self.tokens: dict[str, list[int]] = {}
        self.at: dict[str, list[int]] = {}

    def ask(self, name: str, prompt: list[int], priority: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=ANSWER[name], ignore_eos=True)
        given = {"prompt_token_ids": prompt, "cache_salt": name}
        self._engine.add_request(name, given, params, priority=priority)
        self.tokens[name], self.at[name] = [], []

    def step(self, count: int | None = None) -> None:
        """Make some steps, or all that are left."""
        while self._engine.has_unfinished_requests() and count != 0:
            self._step += 1
            for output in self._engine.step():
                answer = list(output.outputs[0].token_ids)
                known = self.tokens[output.request_id]
                self.at[output.request_id] += [self._step] * (len(answer) - len(known))
                self.tokens[output.request_id] = answer
            count = None if count is None else count - 1


def who_gets_tokens(folder: Path) -> dict[str, Any]:
    """The answers, by whether others were there, and in which steps each request got a token.

    For a process of its own: its engine takes settings of the whole process.

    Args:
        folder: for the store.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    transfer = transfer_config(
        place_of(folder), index_url=None, reuse=ReuseOptions(), request_namespace=False
    )
    llm = LLM(
        str(READER),
        kv_transfer_config=KVTransferConfig(**transfer),
        worker_cls=WORKER,
        scheduling_policy="priority",
        max_num_batched_tokens=BUDGET,
        enforce_eager=True,
        **ENGINE_ARGS,
    )
    told: dict[str, Any] = {}
    for name, others in (("equal", 0), ("behind", 5)):
        llm.reset_prefix_cache()
        run = Stepped(llm)
        for number, (other, prompt) in enumerate(OTHERS.items()):
            run.ask(other, prompt, others + number if others else 0)
        run.step(BEFORE)
        run.ask("first", FIRST, 0)
        run.ask("late", LATE, others)
        run.step()
        told[name] = {"tokens": run.tokens, "at": run.at}
    alone = {}
    for name, prompt in {**OTHERS, "late": LATE, "first": FIRST}.items():
        llm.reset_prefix_cache()
        run = Stepped(llm)
        run.ask(name, prompt, 0)
        run.step()
        alone[name] = run.tokens[name]
    steps = {"steps before the first": BEFORE, "steps of its prefill": FIRST_TOKENS // BUDGET}
    return {**told, "alone": alone, **steps}
