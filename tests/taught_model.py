"""A tiny model that is taught a few answers by heart, for tests of tools and structured output.

A random model writes no tool calls, and none can be downloaded. This one is trained on the very prompts
of some tests and then says what it was taught: real logits, real parsers. It knows nothing else; any
other prompt gets some text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Tools by their names, Hermes' form of calls."""

EOS = "<eos>"
MAX_POSITIONS = 2048
MOST_STEPS = 1500
SURE = 0.5  # how likely every taught token must be where the answers do not part
LEAST_LIKELY = 0.02  # and where they do


@dataclass(frozen=True)
class Lesson:
    """A conversation and what to say.

    The first answer is said freely. Others are said when only they fit: under structured output, for
    example, where the answer must be JSON.
    """

    messages: Sequence[Mapping[str, Any]]
    answers: Sequence[str]
    tools: Sequence[str] = ()  # names


def ask(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def teach(folder: Path, lessons: Sequence[Lesson], *, seed: int = 0) -> Path:
    """Train a model on `lessons` and write it with its tokenizer into `folder`; returns `folder`.

    Raises:
        RuntimeError: it did not learn them.
    """
    tokenizer = _tokenizer(lessons)
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _train(model, tokenizer, lessons)
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _prompt(tokenizer: Any, lesson: Lesson) -> str:
    tools = [{"type": "function", "function": {"name": name}} for name in lesson.tools]
    text: str = tokenizer.apply_chat_template(
        list(lesson.messages), tools=tools or None, tokenize=False, add_generation_prompt=True
    )
    return text


def _train(model: Any, tokenizer: Any, lessons: Sequence[Lesson]) -> None:
    """Until every token of every answer is likely behind its prompt."""
    rows, targets, weights = [], [], []
    for lesson in lessons:
        prompt = tokenizer.encode(_prompt(tokenizer, lesson), add_special_tokens=False)
        for place, text in enumerate(lesson.answers):
            answer = tokenizer.encode(text + EOS, add_special_tokens=False)
            rows.append(prompt + answer)
            targets.append([-100] * len(prompt) + answer)
            weights.append(1.0 if place == 0 else 0.2)
    longest = max(map(len, rows))

    def padded(lists: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in lists])

    tokens, wanted = padded(rows, tokenizer.pad_token_id), padded(targets, -100)[:, 1:]
    known, weight = wanted != -100, torch.tensor(weights)
    first = torch.zeros_like(known)  # where a lesson's answers part
    first[torch.arange(len(rows)), known.int().argmax(1)] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(MOST_STEPS):
        logits = model(tokens).logits[:, :-1]
        logs = torch.log_softmax(logits, -1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        likely = logs.detach().exp()
        if step % 10 == 0 and (likely[known & ~first] > SURE).all():
            mains = torch.tensor([w == 1.0 for w in weights])
            if (likely[mains][first[mains]] > SURE).all() and (likely[first] > LEAST_LIKELY).all():
                return
        loss = -((logs * known).sum(1) * weight).sum() / (known.sum(1) * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise RuntimeError(f"not learnt in {MOST_STEPS} steps: {likely[known].min():.3f}")


def _tokenizer(lessons: Sequence[Lesson]) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[EOS, "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [str(message.get("content")) for lesson in lessons for message in lesson.messages]
    texts += [answer for lesson in lessons for answer in lesson.answers]
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )
