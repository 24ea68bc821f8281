"""Conversations: a prompt that goes on from an earlier one keeps the earlier one's question.

What a query-aware selector picks depends on the question. In a chat, and in an agent's loop, each prompt
is the one before it with more text at its end. If each prompt asked with its own end, its chunks would be
blended anew in every turn. With the first prompt's question the plan stays the same, and vLLM's prefix
cache has its KV.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from blake3 import blake3

from semkv_rag.reuse.plan import ReusePlan
from semkv_rag.reuse.question import LEAST, Question
from semkv_rag.reuse.tokens import TokenArray

CONTEXTS = 1024
QUESTIONS = 16
"""Remembered of each context, the latest."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What stood behind the plan's tokens, and the question that was made of it."""

    length: int
    digest: bytes
    question: Question


class Conversations:
    """The questions of the latest prompts. One per engine; not safe for threads."""

    def __init__(self) -> None:
        self._asked: OrderedDict[bytes, list[_Asked]] = OrderedDict()

    def with_earlier_question(self, plan: ReusePlan, prompt: TokenArray) -> ReusePlan:
        """The plan with the question of the conversation that its prompt carries on, if there is one.

        A text of less than `LEAST` tokens behind the chunks begins none: it may be what all prompts of a
        template have there, sent to have them in the cache.

        Args:
            plan: as `ReusePlan.asking` returns it.
            prompt: all of its tokens.
        """
        behind = prompt[plan.covered :]
        if plan.question is None or plan.options.question_tokens is not None or len(behind) < LEAST:
            return plan
        alike = replace(plan, question=None).digest()
        context = blake3(alike + prompt[: plan.covered].tobytes()).digest()
        asked = self._asked.setdefault(context, [])
        self._asked.move_to_end(context)
        for known in asked:
            if known.length <= len(behind) and known.digest == _digest(behind[: known.length]):
                return replace(plan, question=known.question)
        asked.append(_Asked(len(behind), _digest(behind), plan.question))
        del asked[:-QUESTIONS]
        while len(self._asked) > CONTEXTS:
            self._asked.popitem(last=False)
        return plan


def _digest(tokens: TokenArray) -> bytes:
    return blake3(tokens.tobytes()).digest()
