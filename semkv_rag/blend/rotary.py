"""Moving stored keys to another position.

RoPE (arXiv 2104.09864, section 3.2) rotates pairs of a key's dimensions by its position times a
frequency. Rotations add up, so a key computed at one position is moved to another by rotating it once
more by the difference. Values carry no position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Rotary:
    """One layer's rotation.

    Attributes:
        cos_sin: [positions, 2 * pairs], float32: row p holds the cosines, then the sines, of the
            angles between positions 0 and p. Of unit length: scalings such as YaRN's mscale are part
            of the stored key already and must not be applied again.
        interleaved: pairs are dimensions (0, 1), (2, 3), … as in GPT-J; else the two halves of the
            rotary dimensions, as in GPT-NeoX and Llama.
    """

    cos_sin: Tensor
    interleaved: bool

    def matrix(self, shift: int, head_dim: int) -> Tensor:
        """The rotation that moves a key by `shift` positions, [head_dim, head_dim], float32.

        A key, as a row, is multiplied by it from the right. Dimensions behind the rotary ones
        (partial rotary) stay as they are. All tokens of a span move alike: one product over the
        span is many times faster than the same arithmetic on pairs, token by token.

        Args:
            shift: positions to move by; negative moves to the left.
        """
        cos, sin = self.cos_sin[abs(shift)].chunk(2)
        sin = -sin if shift < 0 else sin
        first, second = self._pairs(torch.arange(2 * len(cos), device=cos.device))
        matrix = torch.eye(head_dim, device=cos.device)
        matrix[first, first], matrix[second, second] = cos, cos
        matrix[first, second], matrix[second, first] = sin, -sin
        return matrix

    def rotate(self, keys: Tensor, shift: int) -> Tensor:
        """Move `keys`, [tokens, kv_heads, head_dim], by `shift` positions, all alike."""
        return keys @ self.matrix(shift, keys.shape[-1]).to(keys)

    def _pairs(self, dimensions: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second members of all pairs of rotary `dimensions`."""
        if self.interleaved:
            return dimensions[0::2], dimensions[1::2]
        half = len(dimensions) // 2
        return dimensions[:half], dimensions[half:]


def rotary_candidates(module: nn.Module | None, positions: int) -> list[Rotary]:
    """The rotations that a model's rotary module may stand for, for shifts below `positions`.

    A module says its frequencies, but not always how it pairs dimensions; the gate compares each
    candidate with keys that the model computes, and keeps the one that gives them.

    Args:
        module: a rotary module with a `cos_sin_cache` and `is_neox_style` (vLLM's own classes), or
            with `inv_freq` (Hugging Face's). None, or anything else, gives no candidate.
        positions: the longest shift that will be asked for, plus one.
    """
    if module is None:
        return []
    if hasattr(module, "cos_sin_cache"):
        # The buffer is in the model's dtype; the float32 table it was made from is not kept.
        compute = getattr(module, "_compute_cos_sin_cache", None)
        table = compute() if compute is not None else module.cos_sin_cache
        assert isinstance(table, Tensor)
        cos, sin = table[:positions].to(torch.float32, copy=True).chunk(2, dim=-1)
        length = torch.sqrt(cos * cos + sin * sin).clamp_min(1e-6)
        unit = torch.cat((cos / length, sin / length), dim=-1)
        return [Rotary(unit, interleaved=not getattr(module, "is_neox_style", True))]
    inv_freq = getattr(module, "inv_freq", None)
    if isinstance(inv_freq, Tensor):
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32, device=inv_freq.device), inv_freq.float()
        )
        unit = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return [Rotary(unit, interleaved=False), Rotary(unit, interleaved=True)]
    return []
