"""Runs of neighbouring positions, and launches cut by tokens and by runs."""

from __future__ import annotations

import torch

from semkv_rag.connector.worker.blend.launch import Launch
from semkv_rag.connector.worker.model.runs import Runs, breaks, longest_part


def test_runs_of_several_requests() -> None:
    runs = Runs.of([torch.tensor([3, 4, 9]), torch.tensor([0]), torch.tensor([1, 5, 6, 7])])
    assert runs.query_start.tolist() == [0, 2, 3, 4, 5, 8]
    assert runs.seq_lens.tolist() == [5, 10, 1, 2, 8]
    assert runs.owners.tolist() == [0, 0, 1, 2, 2]
    assert (len(runs), runs.longest) == (5, 3)


def test_breaks() -> None:
    assert breaks(torch.tensor([7])).tolist() == []
    assert breaks(torch.tensor([7, 8, 9])).tolist() == []
    assert breaks(torch.tensor([1, 3, 4, 8])).tolist() == [1, 3]


def test_a_part_is_bounded_by_tokens_and_by_runs() -> None:
    positions = torch.tensor([0, 1, 2, 5, 6, 9, 12])
    assert longest_part(positions, 100, 100) == 7
    assert longest_part(positions, 4, 100) == 4
    assert longest_part(positions, 100, 4) == 7
    assert longest_part(positions, 100, 3) == 6
    assert longest_part(positions, 100, 1) == 3


def _launch(positions: list[int], *, whole: bool = False) -> Launch:
    return Launch([], torch.tensor([0]), torch.tensor(positions), whole=whole)


def test_a_launch_is_cut_into_pieces_of_about_one_length() -> None:
    rest: Launch | None = _launch([*range(0, 20, 2), *range(100, 110)])
    lengths, runs = [], []
    while rest is not None:
        piece, rest = rest.cut(8, 5)
        lengths.append(len(piece))
        runs.append(piece.runs)
    assert sum(lengths) == 20
    assert max(lengths) <= 8 and max(runs) <= 5


def test_a_launch_that_is_whole_is_not_cut() -> None:
    launch = _launch(list(range(50)), whole=True)
    assert launch.cut(8, 1) == (launch, None)
