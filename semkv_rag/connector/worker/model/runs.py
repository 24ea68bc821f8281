"""Runs: neighbouring positions among the scattered ones that a forward computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of the slices of one forward, in order.

    Attributes:
        query_start: where each run begins among the forward's tokens, and their end, [runs + 1], int32.
        seq_lens: each run's last position + 1, [runs], int32.
        owners: which slice each run is of, [runs], int64.
    """

    query_start: Tensor
    seq_lens: Tensor
    owners: Tensor

    @classmethod
    def of(cls, slices: Sequence[Tensor], *, by_token: bool = False) -> Runs:
        """Those of some positions, each [tokens], int64, ascending, at least one; on the CPU.

        Args:
            by_token: whether each token is taken for a run of its own.
        """
        starts, ends, owners, count = [], [], [], 0
        for owner, positions in enumerate(slices):
            begins = torch.cat((torch.zeros(1, dtype=torch.long), breaks(positions)))
            if by_token:
                begins = torch.arange(len(positions))
            last = torch.cat((begins[1:], torch.tensor([len(positions)]))) - 1
            starts.append(begins + count)
            ends.append(positions[last] + 1)
            owners.append(torch.full_like(begins, owner))
            count += len(positions)
        return cls(
            torch.cat((*starts, torch.tensor([count]))).to(torch.int32),
            torch.cat(ends).to(torch.int32),
            torch.cat(owners),
        )

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest run."""
        return int((self.query_start[1:] - self.query_start[:-1]).max())


def breaks(positions: Tensor) -> Tensor:
    """Where runs begin behind the first one, [runs - 1], int64.

    Args:
        positions: [tokens], int64, ascending.
    """
    return torch.nonzero(positions[1:] != positions[:-1] + 1).flatten() + 1


def longest_part(positions: Tensor, most_tokens: int, most_runs: int) -> int:
    """How many of the first tokens are at most so many, in at most so many runs.

    Args:
        positions: [tokens], int64, ascending, on the CPU.
    """
    begins = breaks(positions)
    within = int(begins[most_runs - 1]) if len(begins) >= most_runs else len(positions)
    return min(within, most_tokens)
