"""How long prefill and blends take, as functions of the prompt's length.

Prefill computes each token in all matrices, and its attention to each token before it. So a prompt of *n*
tokens takes `token_ms * n + pair_ms * n² / 2`. A blend does that for the tokens it computes: their share
of the prompt, in the matrices and in attention alike. What it takes beyond is `cost` times as much for
scattered tokens, and `fixed_ms` once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semkv_rag.errors import OptionError
from semkv_rag.planning.machines import EFFICIENCY, gpu_of
from semkv_rag.planning.model_shape import ModelShape

ASSUMED_COST = 1.15
"""The cost of a scattered token over that of one in plain prefill, where nothing was measured."""
ASSUMED_FIXED_MS = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One length of prompt, as it was measured. Times are to the first token.

    Attributes:
        charged_ratio: what the blend computed, as a share of the full prefill.
        load_ms: reading and writing the stored KV, which went on beside the rest.
    """

    tokens: int
    plain_ms: float
    blend_ms: float
    load_ms: float
    charged_ratio: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One model on one machine.

    Attributes:
        token_ms: of a token, without attention.
        pair_ms: of a token's attention to one token before it.
        cost: of a computed token in a blend, over one in plain prefill.
        fixed_ms: of a blend, whatever its length.
        stored_tokens_per_s: at which documents' chunks are computed and stored; None: not measured.
        load_gb_per_s: the most at which KV gets into the cache, however fast it is read; None: unknown.
        measured: whether these are measurements of this machine.
    """

    token_ms: float
    pair_ms: float
    cost: float = ASSUMED_COST
    fixed_ms: float = ASSUMED_FIXED_MS
    stored_tokens_per_s: float | None = None
    load_gb_per_s: float | None = None
    measured: bool = False

    def prefill_ms(self, tokens: int) -> float:
        """Plain prefill of a prompt."""
        return self.token_ms * tokens + self.pair_ms * tokens**2 / 2

    def blend_ms(self, tokens: int, charged_ratio: float, load_ms: float) -> float:
        """A blend of a prompt, of which a share is computed.

        Loading goes on beside the computing, so the longer of the two counts.
        """
        computed = self.cost * charged_ratio * self.prefill_ms(tokens)
        return self.fixed_ms + max(computed, load_ms)


def timing_of_gpu(shape: ModelShape, name: str) -> Timing:
    """The timing of a model on a GPU of the table, by arithmetic.

    Raises:
        OptionError: the GPU is not in the table.
    """
    gpu = gpu_of(name)
    flops_per_ms = gpu.peak_tflops * 1e9 * EFFICIENCY
    return Timing(
        token_ms=shape.token_flops / flops_per_ms,
        pair_ms=shape.pair_flops / flops_per_ms,
        load_gb_per_s=gpu.link_gb_per_s,
    )


def timing_of(
    measured: Sequence[Measured],
    kv_bytes_per_token: int,
    stored_tokens_per_s: float | None = None,
) -> Timing:
    """What fits measurements best, each length counting the same.

    Args:
        measured: of two lengths or more.
        kv_bytes_per_token: of the model that was measured.
        stored_tokens_per_s: as it was measured.

    Raises:
        OptionError: there are fewer, or they fit no machine.
    """
    if len({one.tokens for one in measured}) < 2:
        raise OptionError("a plan needs measurements of two lengths of prompt: give --measure")
    tokens = np.array([one.tokens for one in measured], float)
    plain = np.array([one.plain_ms for one in measured])
    token_ms, pair_ms = _fitted(np.stack([tokens, tokens**2 / 2], 1), plain)
    whole = token_ms * tokens + pair_ms * tokens**2 / 2
    charged = np.array([one.charged_ratio for one in measured])
    blends = np.array([one.blend_ms for one in measured])
    cost, fixed_ms = _fitted(np.stack([charged * whole, np.ones_like(whole)], 1), blends)
    seconds = sum(one.load_ms for one in measured) / 1000
    rate = float(tokens.sum()) * kv_bytes_per_token / 1e9 / seconds if seconds > 0 else None
    return Timing(token_ms, pair_ms, cost, fixed_ms, stored_tokens_per_s, rate, measured=True)


def _fitted(terms: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Two factors, none below zero, with the least squares of relative errors.

    Args:
        terms: [measurements, 2].
        times: [measurements].
    """
    scaled = terms / times[:, None]
    ones = np.ones(len(times))
    both = np.linalg.lstsq(scaled, ones, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    # One of them alone: noise made the other negative.
    first, second = (float(column @ ones / (column @ column)) for column in scaled.T)
    errors = [np.sum((scaled[:, 0] * first - 1) ** 2), np.sum((scaled[:, 1] * second - 1) ** 2)]
    return (first, 0.0) if errors[0] <= errors[1] else (0.0, second)
