"""Which spans are exact, and which of several contexts is preferred."""

from __future__ import annotations

from .shelf import Shelf

PREFIX = list(range(100, 120))
A = list(range(1000, 1040))
B = list(range(2000, 2040))
C = list(range(3000, 3040))


def test_chunk_behind_its_own_context_is_exact(shelf: Shelf) -> None:
    shelf.put("a", A, PREFIX)
    assert shelf.match(PREFIX + A) == [("a", 0, 20, 40, True)]
    assert shelf.match([7, *PREFIX, *A]) == [("a", 0, 21, 40, False)]
    assert shelf.match([7, *PREFIX[1:], *A]) == [("a", 0, 20, 40, False)]
    assert shelf.match(PREFIX + A[1:]) == [("a", 1, 20, 39, False)]


def test_cut_of_an_exact_span_stays_exact(shelf: Shelf) -> None:
    shelf.put("a", A, PREFIX)
    assert shelf.match(PREFIX + A[:25] + B) == [("a", 0, 20, 25, True)]


def test_tokens_behind_an_edit_are_not_exact(shelf: Shelf) -> None:
    shelf.put("a", A, PREFIX)
    assert shelf.match(PREFIX + A[:20] + [7] + A[21:]) == [
        ("a", 0, 20, 20, True),
        ("a", 21, 41, 19, False),
    ]


def test_a_prompt_prefix_and_the_chunk_behind_it_are_both_exact(shelf: Shelf) -> None:
    shelf.put("prefix", PREFIX)
    shelf.put("a", A, PREFIX)
    shelf.put("b", B, PREFIX)
    assert shelf.match(PREFIX + B + A) == [
        ("prefix", 0, 0, 20, True),
        ("b", 0, 20, 40, True),
        ("a", 0, 60, 40, False),
    ]


def test_of_several_contexts_the_exact_one_is_taken(shelf: Shelf) -> None:
    shelf.put("other", A, B)
    shelf.put("none", A)
    shelf.put("prefix", A, PREFIX)
    assert shelf.match(PREFIX + A) == [("prefix", 0, 20, 40, True)]
    assert shelf.match(A) == [("none", 0, 0, 40, True)]
    assert shelf.match(B + A) == [("other", 0, 40, 40, True)]


def test_of_inexact_contexts_the_one_that_fits_best_is_taken(shelf: Shelf) -> None:
    shelf.put("none", A)
    shelf.put("short", A, B[-3:])
    shelf.put("long", A, PREFIX + B[-9:])
    shelf.put("foreign", A, PREFIX)
    assert shelf.match([7, *B, *A]) == [("long", 0, 41, 40, False)]
    assert shelf.match([7, *B[-4:], *A]) == [("short", 0, 5, 40, False)]
    # None fits: the one that has seen most other text.
    assert shelf.match([7, 8, 9, *A]) == [("long", 0, 3, 40, False)]
    shelf.index.remove(["short", "long", "foreign"])
    assert shelf.match([7, 8, 9, *A]) == [("none", 0, 3, 40, False)]


def test_the_neighbour_or_the_prompt_prefix_whichever_stands_there(shelf: Shelf) -> None:
    between = [3, 4]
    prefix = [*PREFIX, *between]  # ends as every chunk does in a prompt
    shelf.put("left", B, [*prefix, *A])
    shelf.put("prefix", B, prefix)
    for joint in ([], between, [3, 4, 5, 6]):
        (span,) = shelf.match([7, 7, *A, *joint, *B])
        assert span == ("left", 0, 42 + len(joint), 40, False)
        (span,) = shelf.match([7, 7, *C, *joint, *B])
        assert span == ("left", 0, 42 + len(joint), 40, False), "a neighbour, if not this one"
    # What a tokenizer merges at the seams.
    assert shelf.match([7, *A[:-1], 5, *B[1:]]) == [("left", 1, 41, 39, False)]
    assert shelf.match([*prefix, *A, *B]) == [("left", 0, 62, 40, True)]
    assert shelf.match([*prefix, *B]) == [("prefix", 0, 22, 40, True)]


def test_exact_span_wins_over_a_longer_inexact_one(shelf: Shelf) -> None:
    shelf.put("whole", PREFIX + A + B, [1, 2, 3])
    shelf.put("a", A, PREFIX)
    assert shelf.match(PREFIX + A + B) == [
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
    shelf.put("prompt", PREFIX + A)
    shelf.put("prefix", PREFIX)
    shelf.put("a", A, PREFIX)
    assert shelf.match(PREFIX + A) == [("prompt", 0, 0, 60, True)]
