"""The yardstick's model: Qwen3's shape in plain PyTorch, small enough to train on one core.

Contexts and questions lie in one tensor: the first `split` columns are the context, the others questions.
Each question sees its context and itself, never another question, so that one pass answers them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from workbench.quality import words

Hook = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's rotated keys and its values, [rows, heads, columns, head_dim], and gives those to
use."""

NAME_SPREAD = 0.05
"""The standard deviation of a word's own direction, before training."""


@dataclass(frozen=True)
class Shape:
    """Qwen3's sizes; as many key heads as query heads."""

    vocabulary: int = len(words.WORDS)
    hidden: int = 192
    layers: int = 6
    heads: int = 4
    head_dim: int = 64
    feed_forward: int = 384
    rope_theta: float = 1e4


class Norm(nn.Module):
    """RMS norm over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """`x` [..., columns, head_dim] turned by (cos, sin) [..., columns, head_dim / 2]."""
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.heads * shape.head_dim
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.v_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(shape.head_dim), Norm(shape.head_dim)

    def project(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [rows, heads, columns, head_dim]."""
        rows, columns, _ = x.shape
        by_head = (rows, columns, self.heads, self.head_dim)
        query = self.q_norm(self.q_proj(x).view(by_head)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(by_head)).transpose(1, 2)
        value = self.v_proj(x).view(by_head).transpose(1, 2)
        return rotate(query, turn), rotate(key, turn), value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masks: tuple[Tensor, Tensor]
    ) -> Tensor:
        split = masks[0].shape[-1]
        query = query * self.head_dim**-0.5
        context = query[:, :, :split] @ key[:, :, :split].mT + masks[0]
        questions = query[:, :, split:] @ key.mT + masks[1]
        mixed = torch.cat(
            [
                torch.softmax(context, -1) @ value[:, :, :split],
                torch.softmax(questions, -1) @ value,
            ],
            dim=2,
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden), Norm(shape.hidden)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor],
        hook: Hook | None = None,
    ) -> Tensor:
        query, key, value = self.self_attn.project(self.input_layernorm(x), turn)
        if hook is not None:
            key, value = hook(key, value)
        x = x + self.self_attn.attend(query, key, value, masks)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Model(nn.Module):
    """Embeddings are tied. Those of names are a class's direction plus one of their own, never
    trained."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                inward = 0.5 / math.sqrt(2 * self.shape.layers)
                gain = inward if "o_proj" in name or "down_proj" in name else 0.6
                nn.init.normal_(weight, std=gain / math.sqrt(weight.shape[1]))
        with torch.no_grad():
            table = self.embed_tokens.weight
            nn.init.normal_(table, std=NAME_SPREAD)
            # What all words share lets a head look a fixed number of words back before it knows any.
            common, plain, proper = torch.randn(3, self.shape.hidden) * 0.03
            table += common
            for group, direction in (
                (words.NAMES + words.HELD_NAMES, plain),
                (words.PROPER + words.HELD_PROPER, proper),
            ):
                table[group] += direction
        trained = (torch.arange(self.shape.vocabulary) < words.FIRST_NAME)[:, None].float()
        table = self.embed_tokens.weight
        table.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient * trained.to(gradient.device)
        )

    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of `positions` [rows, columns], each [rows, 1, columns, head_dim / 2]."""
        pairs = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float()
        angle = positions[:, None, :, None].float() * self.shape.rope_theta ** (
            -pairs / self.shape.head_dim
        )
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: tuple[Tensor, Tensor],
        hooks: Sequence[Hook | None] | None = None,
        blocks: Sequence[Callable[..., Tensor]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """The embeddings and each layer's output, [rows, columns, hidden]; `blocks` may be compiled
        ones."""
        turn = self.turn(positions, dtype)
        masks = (masks[0].to(dtype), masks[1].to(dtype))
        x = self.embed_tokens(tokens).to(dtype)
        states = [x]
        every: Sequence[Callable[..., Tensor]] = blocks or self.blocks()
        for index, block in enumerate(every):
            x = block(x, turn, masks) if hooks is None else block(x, turn, masks, hooks[index])
            states.append(x)
        return states

    def logits(self, last: Tensor) -> Tensor:
        """Next-word logits of the last layer's output, [..., vocabulary]."""
        last = self.norm(last)
        return F.linear(last, self.embed_tokens.weight.to(last.dtype))
