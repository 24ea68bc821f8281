"""How close blends come to full prefill on models that were never taught to show it.

    python -m workbench.quality.agreement [--prompts 40]

Two models: random weights (12 layers) on the yardstick's contexts, and the reader on its own
documents. Measured at the question: the divergence KL(full || blend) of the last token's next-word
probabilities in nats, and the error of attention's outputs, |blend - full| / |full|, averaged over the
question's tokens and the layers. Neither knows right from wrong answers; lower is closer. Random weights
attend to almost everything alike, so there any token is about as good to compute as any other.

Ratios are uncharged; beside each is what it would be charged in a model of 32 layers.

Writes build/bench/agreement.json and agreement.png.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

from workbench.figures import save
from workbench.quality import grammar, words
from workbench.quality.batches import Batch
from workbench.quality.network import Model, Shape
from workbench.quality.passes import read
from workbench.quality.precomputed import fresh, precompute
from workbench.quality.questions import Questions
from workbench.quality.reuse import KV
from workbench.quality.ways import Case, Ours

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "examples" / "reader"
CORPUS = ROOT / "examples" / "corpus"
RATIOS = (0, 5, 10, 15, 20, 30, 100)
"""Per cent."""
SELECTORS = (
    Ours("kv_deviation_published", 1),
    Ours("k_deviation_published", 1),
    Ours("kv_deviation", 1),
    Ours("kv_deviation", 2),
    Ours("query_attention"),
    Ours("deviation_weighted_attention", 1),
    Ours("two_hop_attention"),
    Ours("deviation_x_attention", 1),
    Ours("chunk_head"),
    Ours("random"),
)
_LAYERS = 32
Prompt = tuple[list[list[int]], list[int]]
"""Chunks of tokens, and the question's tokens."""


@dataclass(frozen=True)
class Closeness:
    """Means over all prompts.

    Attributes:
        divergence: KL(full || blend) of the next word, nats.
        error: relative error of attention's outputs.
        charged: per cent of full prefill, in a model of 32 layers.
    """

    divergence: float
    error: float
    charged: float


def as_case(model: Model, prompt: Prompt) -> Case:
    """The prompt with its chunks stored alone."""
    chunks, question = prompt
    tokens = torch.tensor([[token for chunk in chunks for token in chunk]])
    place = torch.tensor([[i for i, chunk in enumerate(chunks) for _ in chunk]])
    nobody = torch.zeros(1, 0, dtype=torch.int64)
    context = Batch(
        tokens=tokens,
        positions=torch.arange(tokens.shape[1])[None],
        chunks=place,
        documents=torch.zeros_like(place),
        lengths=torch.tensor([tokens.shape[1]]),
        question=nobody,
        question_chunk=nobody,
        asked=[],
        carriers=[],
    )
    asked = Questions(context, torch.tensor([[question]]), len(question), [[]])
    return Case(model, asked, fresh(model, context), precompute(model, context, "alone"))


class _Watch:
    """Asks, and keeps what each layer's attention gives for the question."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._outputs: list[Tensor] = []
        self._on = False
        self._hooks = [
            module.register_forward_hook(self._keep)
            for name, module in model.named_modules()
            if name.endswith("o_proj")
        ]

    def _keep(self, module: torch.nn.Module, args: object, output: Tensor) -> None:
        if self._on:
            self._outputs.append(output)

    @torch.no_grad()
    def ask(self, case: Case, cache: KV) -> tuple[Tensor, Tensor]:
        """The next word's log-probabilities, and attention's outputs, [layers, question, hidden]."""
        self._on, self._outputs = True, []
        last = read(self._model, cache, case.questions.contexts.lengths, case.questions.tokens)
        self._on = False
        return self._model.logits(last[0, 0, -1]).log_softmax(-1), torch.cat(self._outputs)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def measure(model: Model, prompts: Sequence[Prompt]) -> dict[str, Closeness]:
    """By way, `SELECTOR RATIO`."""
    watch = _Watch(model)
    sums: dict[str, list[tuple[float, float, float]]] = {}
    for prompt in prompts:
        case = as_case(model, prompt)
        full, outputs = watch.ask(case, case.cached(case.fresh.kv))
        for selector in SELECTORS:
            for ratio in RATIOS:
                blended, near = watch.ask(case, selector.cache(case, [ratio / 100]))
                divergence = F.kl_div(blended, full, log_target=True, reduction="sum").item()
                error = (near - outputs).norm(dim=-1) / outputs.norm(dim=-1)
                charged = 100 * selector.charged(ratio / 100, case.shape(0, _LAYERS))
                sums.setdefault(f"{selector.name} {ratio}", []).append(
                    (divergence, error.mean().item(), charged)
                )
    watch.close()
    return {
        way: Closeness(*(sum(column) / len(each) for column in zip(*each, strict=True)))
        for way, each in sums.items()
    }


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
    """The reader, and its tokenizer."""
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
    """Three documents of one kind, their paragraphs as chunks, with a question about one."""
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


def plot(models: Mapping[str, Mapping[str, Closeness]]) -> Callable[[Any], None]:
    """Divergence by what it is charged, one panel for each model."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(models), squeeze=False)[0]
        for axis, (name, ways) in zip(axes, models.items(), strict=True):
            for selector in SELECTORS:
                found = [ways[f"{selector.name} {ratio}"] for ratio in RATIOS[:-1]]
                axis.plot(
                    [each.charged for each in found],
                    [each.divergence for each in found],
                    marker=".",
                    label=selector.name,
                )
            axis.set_yscale("log")
            axis.set_title(name, fontsize=10)
            axis.set_xlabel("charged, % of full prefill", fontsize=8)
        axes[0].set_ylabel("KL(full || blend), nats")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    count = parser.parse_args().prompts
    read_, split = reader()
    results = {
        "random weights": measure(random_model(), yardstick_prompts(count)),
        "reader": measure(read_, reader_prompts(count, split)),
    }
    for name, ways in results.items():
        print(f"\n{name}, {count} prompts: divergence (nats) / error of attention outputs")
        for selector in SELECTORS:
            told = [(ratio, ways[f"{selector.name} {ratio}"]) for ratio in RATIOS]
            numbers = "  ".join(f"{r} %: {c.divergence:.2g} / {c.error:.3f}" for r, c in told)
            print(f"  {selector.name:26s} {numbers}")
    figures = {
        name: {way: vars(each) for way, each in ways.items()} for name, ways in results.items()
    }
    print(f"\n{save('agreement', {'prompts': count, 'models': figures}, plot(results))}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
