"""Which spans are exact, and which of several contexts is preferred."""

from __future__ import annotations

from .shelf import Shelf

HEAD = list(range(100, 120))
A = list(range(1000, 1040))
B = list(range(2000, 2040))


def test_chunk_behind_its_own_context_is_exact(shelf: Shelf) -> None:
    shelf.put("a", A, HEAD)
    assert shelf.match(HEAD + A) == [("a", 0, 20, 40, True)]
    assert shelf.match([7, *HEAD, *A]) == [("a", 0, 21, 40, False)]
    assert shelf.match([7, *HEAD[1:], *A]) == [("a", 0, 20, 40, False)]
    assert shelf.match(HEAD + A[1:]) == [("a", 1, 20, 39, False)]


def test_cut_of_an_exact_span_stays_exact(shelf: Shelf) -> None:
    shelf.put("a", A, HEAD)
    assert shelf.match(HEAD + A[:25] + B) == [("a", 0, 20, 25, True)]


def test_tokens_behind_an_edit_are_not_exact(shelf: Shelf) -> None:
    shelf.put("a", A, HEAD)
    assert shelf.match(HEAD + A[:20] + [7] + A[21:]) == [
        ("a", 0, 20, 20, True),
        ("a", 21, 41, 19, False),
    ]


def test_head_and_the_chunk_behind_it_are_both_exact(shelf: Shelf) -> None:
    shelf.put("head", HEAD)
    shelf.put("a", A, HEAD)
    shelf.put("b", B, HEAD)
    assert shelf.match(HEAD + B + A) == [
        ("head", 0, 0, 20, True),
        ("b", 0, 20, 40, True),
        ("a", 0, 60, 40, False),
    ]


def test_of_several_contexts_the_exact_one_is_taken(shelf: Shelf) -> None:
    shelf.put("other", A, B)
    shelf.put("none", A)
    shelf.put("head", A, HEAD)
    assert shelf.match(HEAD + A) == [("head", 0, 20, 40, True)]
    assert shelf.match(A) == [("none", 0, 0, 40, True)]
    assert shelf.match(B + A) == [("other", 0, 40, 40, True)]


def test_of_inexact_contexts_the_longest_match_to_the_left_is_taken(shelf: Shelf) -> None:
    shelf.put("none", A)
    shelf.put("short", A, B[-3:])
    shelf.put("long", A, HEAD + B[-5:])
    shelf.put("foreign", A, HEAD)
    assert shelf.match([7, *B, *A]) == [("long", 0, 41, 40, False)]
    assert shelf.match([7, 8, 9, *A]) == [("none", 0, 3, 40, False)]  # a draw: the oldest


def test_exact_span_wins_over_a_longer_inexact_one(shelf: Shelf) -> None:
    shelf.put("whole", HEAD + A + B, [1, 2, 3])
    shelf.put("a", A, HEAD)
    assert shelf.match(HEAD + A + B) == [
        ("whole", 0, 0, 20, False),
        ("a", 0, 20, 40, True),
        ("whole", 60, 60, 40, False),
    ]


def test_exact_span_keeps_the_tokens_it_shares_with_its_neighbour(shelf: Shelf) -> None:
    shelf.put("left", A[:20])
    shelf.put("middle", A[10:30], [7, *A[:10]])
    assert shelf.match([7, *A[:30]]) == [("middle", 0, 11, 20, True)]
    shelf.put("longer", [9, *A[:20]], B)
    assert shelf.match([9, *A[:30]])[0] == ("longer", 0, 0, 19, False)


def test_longest_exact_run_is_taken(shelf: Shelf) -> None:
    shelf.put("prompt", HEAD + A)
    shelf.put("head", HEAD)
    shelf.put("a", A, HEAD)
    assert shelf.match(HEAD + A) == [("prompt", 0, 0, 60, True)]
