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


def test_each_token_a_run() -> None:
    runs = Runs.of([torch.tensor([3, 4, 9]), torch.tensor([0])], by_token=True)
    assert runs.query_start.tolist() == [0, 1, 2, 3, 4]
    assert runs.seq_lens.tolist() == [4, 5, 10, 1]
    assert runs.owners.tolist() == [0, 0, 0, 1]
    assert (len(runs), runs.longest) == (4, 1)


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


def _cut(launch: Launch, most_tokens: int, most_runs: int) -> list[Launch]:
    pieces, rest = [], launch
    while rest is not None:
        piece, rest = rest.cut(most_tokens, most_runs)
        pieces.append(piece)
    together = torch.cat([piece.positions for piece in pieces])
    assert together.tolist() == launch.positions.tolist()
    return pieces


def test_a_launch_is_cut_by_tokens_and_runs() -> None:
    pieces = _cut(_launch([*range(0, 20, 2), *range(100, 112)]), 8, 5)
    assert [(len(piece), piece.runs) for piece in pieces] == [(5, 5), (5, 5), (8, 1), (4, 1)]


def test_no_piece_is_left_with_a_few_tokens() -> None:
    assert [len(piece) for piece in _cut(_launch(list(range(210))), 100, 9)] == [100, 55, 55]
    assert [len(piece) for piece in _cut(_launch(list(range(230))), 100, 9)] == [100, 100, 30]


def test_a_launch_that_is_whole_is_not_cut() -> None:
    launch = _launch(list(range(50)), whole=True)
    assert launch.cut(8, 1) == (launch, None)
