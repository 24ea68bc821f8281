"""How close blends come to full prefill on models that were never taught to show it.

    python -m benchmarks.quality.agreement [--prompts 40]

Two models: random weights (12 layers) on the yardstick's contexts, and the demo's reader on its own
documents. Measured at the question: the divergence KL(full || blend) of the last token's next-word
probabilities in nats, and the error of attention's outputs, |blend - full| / |full|, averaged over the
question's tokens and the layers. Neither knows right from wrong answers; lower is closer. Random weights
attend to almost everything alike, so there any token is about as good to compute as any other.

Writes build/bench/agreement.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality import grammar, rules, words
from benchmarks.quality.batches import Batch
from benchmarks.quality.network import Model, Shape
from benchmarks.quality.reuse import Blend, Score, blend, prefill, whole
from benchmarks.quality.study import RATIOS

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "examples" / "reader"
CORPUS = ROOT / "examples" / "corpus"
Prompt = tuple[list[list[int]], list[int]]
"""Chunks of tokens, and the question's tokens."""
_RULES: dict[str, tuple[Score, int]] = {
    "HKVD@1": (rules.by_deviation, 1),
    "HKVD@2": (rules.by_deviation, 2),
    "random": (rules.by_chance(1), -1),
    "chunk head": (rules.by_chunk_head, -1),
}


def one_row(prompt: Prompt) -> Batch:
    """The prompt as a batch of one context with one question."""
    chunks, question = prompt
    tokens = [token for chunk in chunks for token in chunk]
    place = torch.tensor([[i for i, chunk in enumerate(chunks) for _ in chunk]])
    behind = torch.zeros(1, len(question), dtype=torch.int64)
    return Batch(
        tokens=torch.tensor([tokens + question]),
        positions=torch.arange(len(tokens) + len(question))[None],
        chunks=place,
        documents=torch.zeros_like(place),
        lengths=torch.tensor([len(tokens)]),
        question=behind,
        question_chunk=behind,
        asked=[],
        carriers=[],
    )


class _Watch:
    """Keeps what each layer's attention gives for the question."""

    def __init__(self, model: Model) -> None:
        self.outputs: list[Tensor] = []
        self._hooks = [
            module.register_forward_hook(lambda _m, _i, output: self.outputs.append(output))
            for name, module in model.named_modules()
            if name.endswith("o_proj")
        ]

    def take(self, split: int) -> Tensor:
        """[layers, question tokens, hidden]; forgets them."""
        taken = torch.cat([output[:, split:] for output in self.outputs])
        self.outputs.clear()
        return taken

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def measure(model: Model, prompts: Sequence[Prompt]) -> dict[str, tuple[float, float]]:
    """By way: mean divergence (nats) and mean relative error of attention outputs."""
    watch = _Watch(model)
    sums: dict[str, list[tuple[float, float]]] = {}
    for prompt in prompts:
        batch = one_row(prompt)
        last, _ = prefill(model, batch, whole(batch))
        full, outputs = _log_probabilities(model, last), watch.take(batch.split)
        _, stored = prefill(model, batch, batch.chunks)
        watch.take(batch.split)
        for name, (score, check) in _RULES.items():
            for ratio in (*RATIOS, 1.0):
                last, _ = blend(model, batch, stored, Blend(ratio, score, check))
                blended = _log_probabilities(model, last)
                divergence = F.kl_div(blended, full, log_target=True, reduction="sum").item()
                error = (watch.take(batch.split) - outputs).norm(dim=-1) / outputs.norm(dim=-1)
                way = f"{name} {100 * ratio:g}"
                sums.setdefault(way, []).append((divergence, error.mean().item()))
    watch.close()
    return {
        way: (sum(d for d, _ in each) / len(each), sum(e for _, e in each) / len(each))
        for way, each in sums.items()
    }


def _log_probabilities(model: Model, last: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model.logits(last[0, -1]), -1)


def random_model() -> Model:
    """Random weights, 12 layers."""
    torch.manual_seed(0)
    return Model(Shape(layers=12))


def yardstick_prompts(count: int) -> list[Prompt]:
    """Contexts of the yardstick, each with a question about its last fact."""
    draw = random.Random(12)
    prompts = []
    for _ in range(count):
        context = grammar.make_context(draw, held=True)
        chunks: list[list[int]] = [[] for _ in range(context.chunks[-1] + 1)]
        for token, chunk in zip(context.tokens, context.chunks, strict=True):
            chunks[chunk].append(token)
        prompts.append((chunks, [words.ASK, context.facts[-1].name, words.QUESTION]))
    return prompts


def reader() -> tuple[Model, Callable[[str], list[int]]]:
    """The demo's model, and its tokenizer."""
    config = json.loads((READER / "config.json").read_text())
    shape = Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        feed_forward=config["intermediate_size"],
        rope_theta=config["rope_parameters"]["rope_theta"],
    )
    model = Model(shape)
    weights = load_file(READER / "model.safetensors")
    model.load_state_dict(
        {n.removeprefix("model."): w.float() for n, w in weights.items() if n.startswith("model.")}
    )
    known = json.loads((READER / "tokenizer.json").read_text())["model"]["vocab"]
    return model, lambda text: [known.get(word, 2) for word in text.split()]


def reader_prompts(count: int, split: Callable[[str], list[int]]) -> list[Prompt]:
    """Three documents of one kind, their paragraphs as chunks, with a question of the demo about one."""
    draw = random.Random(13)
    asked = json.loads((CORPUS / "questions.json").read_text())
    prompts = []
    for _ in range(count):
        question = draw.choice(asked)
        source = CORPUS / question["source"]
        others = [path for path in sorted(source.parent.glob("*.txt")) if path != source]
        documents = [source, *draw.sample(others, 2)]
        draw.shuffle(documents)
        paragraphs = [p for path in documents for p in path.read_text().split("\n\n")]
        ask = f"Question : {question['question']} Answer :"
        prompts.append(([split(p) for p in paragraphs if p.strip()], split(ask)))
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    count = parser.parse_args().prompts
    read, split = reader()
    results = {
        "random weights": measure(random_model(), yardstick_prompts(count)),
        "reader": measure(read, reader_prompts(count, split)),
    }
    for name, ways in results.items():
        print(f"\n{name}, {count} prompts: divergence (nats) / error of attention outputs")
        for rule in _RULES:
            told = [(r, *ways[f"{rule} {100 * r:g}"]) for r in (*RATIOS, 1.0)]
            numbers = "  ".join(f"{100 * r:g} %: {d:.3g} / {e:.3f}" for r, d, e in told)
            print(f"  {rule:12s} {numbers}")
    out = ROOT / "build" / "bench" / "agreement.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
