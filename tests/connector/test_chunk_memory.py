"""Chunks in memory: bounded, verified once, never torn, and each file read once."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

from semkv_rag.connector.worker import chunk_memory
from semkv_rag.connector.worker.arena import ALIGNMENT, Arena
from semkv_rag.connector.worker.chunk_memory import ChunkKey, ChunkMemory, HeldChunk
from semkv_rag.errors import ChunkFileError
from semkv_rag.store import ChunkFile, write_chunk
from semkv_rag.store.codecs import EncodedLayer
from tests.store import made

LAYERS = 5


class Shelf:
    """Chunk files by a number, and how often each was opened and its layers were read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.opened: list[int] = []
        self.read: list[tuple[str, int]] = []
        layers_in = ChunkFile.layers_in

        def counting(
            file: ChunkFile, memory: torch.Tensor, begin: int, end: int
        ) -> tuple[list[EncodedLayer], torch.Tensor | None]:
            self.read += [(file.header.id, layer) for layer in range(begin, end)]
            return layers_in(file, memory, begin, end)

        monkeypatch.setattr(ChunkFile, "layers_in", counting)

    def path(self, seed: int, tokens: int = 16) -> Path:
        path = self.folder / f"{seed}-{tokens}"
        if not path.exists():
            header = made.header(seed, tokens=tokens, layers=LAYERS)
            write_chunk(path, header, made.layers(header, seed), made.sensitivity(header, seed))
        return path

    def bytes_of(self, tokens: int = 16) -> int:
        with ChunkFile(self.path(0, tokens), model=None) as file:
            return -(-file.kv_bytes // ALIGNMENT) * ALIGNMENT

    def opener(self, seed: int, tokens: int = 16) -> Callable[[], ChunkFile]:
        def open_file() -> ChunkFile:
            self.opened.append(seed)
            return ChunkFile(self.path(seed, tokens), model=None)

        return open_file


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(chunk_memory, "READ_BYTES", 1)  # a layer at a time
    return Shelf(tmp_path, monkeypatch)


def key(seed: int, namespace: str = "default") -> ChunkKey:
    return ChunkKey(made.MODEL, namespace, str(seed), "plain")


def with_room_for(shelf: Shelf, chunks: int) -> ChunkMemory:
    return ChunkMemory(Arena(chunks * shelf.bytes_of(), pinned=False))


def use(memory: ChunkMemory, shelf: Shelf, seed: int, tokens: int = 16) -> None:
    """Hold a chunk and compare all of it with what was stored."""
    with memory.holding(key(seed), shelf.opener(seed, tokens)) as chunk:
        assert chunk is not None
        check(chunk, seed, tokens)


def check(chunk: HeldChunk, seed: int, tokens: int = 16) -> None:
    header = made.header(seed, tokens=tokens, layers=LAYERS)
    for index, (keys, values) in enumerate(made.layers(header, seed)):
        found = chunk.encoded(index).decode()
        assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    codes = chunk.sensitivity()
    assert codes is not None
    assert torch.equal(codes, made.sensitivity(header, seed))


def seeds(memory: ChunkMemory) -> list[int]:
    return [int(found.chunk_id) for found in memory.chunks]


def test_a_chunk_is_read_once(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    for _ in range(3):
        use(memory, shelf, 1)
    assert shelf.opened == [1]
    assert len(shelf.read) == LAYERS


def test_what_was_used_longest_ago_goes(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 3)
    for seed in (1, 2, 3, 1, 4):
        use(memory, shelf, seed)
    assert seeds(memory) == [3, 1, 4]
    assert memory.used_bytes == 3 * shelf.bytes_of()


def test_a_chunk_in_use_stays_as_it_is(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    with memory.holding(key(1), shelf.opener(1)) as held:
        assert held is not None
        check(held, 1)
        for seed in (2, 3, 4, 5):
            use(memory, shelf, seed)
        check(held, 1)
        assert seeds(memory) == [1, 5]


def test_where_all_is_in_use_there_is_no_room(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    with ExitStack() as holds:
        for seed in (1, 2):
            holds.enter_context(memory.holding(key(seed), shelf.opener(seed)))
        assert holds.enter_context(memory.holding(key(3), shelf.opener(3))) is None
    use(memory, shelf, 3)


def test_a_chunk_larger_than_all_of_it_pushes_nothing_out(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    for seed in (1, 2):
        use(memory, shelf, seed)
    with memory.holding(key(9), shelf.opener(9, tokens=64)) as chunk:
        assert chunk is None
    assert seeds(memory) == [1, 2]


def test_needed_chunks_stay(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    for seed in (1, 2):
        use(memory, shelf, seed)
    memory.needed = {key(1)}
    use(memory, shelf, 3)
    assert seeds(memory) == [1, 3]
    memory.needed = frozenset()
    use(memory, shelf, 4)
    assert seeds(memory) == [3, 4]


def test_reading_ahead_pushes_out_only_what_was_used(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    use(memory, shelf, 1)
    for seed in (2, 3, 4):
        with memory.holding(key(seed), shelf.opener(seed), ahead=True) as chunk:
            assert (chunk is None) == (seed == 4)
            if chunk is not None:
                check(chunk, seed)
    assert seeds(memory) == [2, 3]
    shelf.opened.clear()
    use(memory, shelf, 2)  # is used now, and may go
    assert shelf.opened == []
    with memory.holding(key(4), shelf.opener(4), ahead=True) as chunk:
        assert chunk is not None
        check(chunk, 4)
    assert seeds(memory) == [3, 4]


def test_namespaces_are_apart(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    use(memory, shelf, 1)
    with memory.holding(key(1, "another"), shelf.opener(2)) as chunk:
        assert chunk is not None
        check(chunk, 2)
    assert shelf.opened == [1, 2]
    use(memory, shelf, 1)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_damaged_chunk_does_not_stay(shelf: Shelf, layer: int) -> None:
    memory = with_room_for(shelf, 2)
    path = shelf.path(1)
    data = bytearray(path.read_bytes())
    with ChunkFile(path, model=None) as file:
        kv_bytes = file.kv_bytes
    # The sensitivities are at the end, [layers, tokens].
    data[len(data) - kv_bytes + layer * (kv_bytes // LAYERS - 16)] ^= 1
    path.write_bytes(data)
    with memory.holding(key(1), shelf.opener(1)) as chunk:
        assert chunk is not None
        for index in range(layer):
            chunk.encoded(index)
        for _ in range(2):
            with pytest.raises(ChunkFileError, match="checksum"):
                chunk.encoded(layer)
        with pytest.raises(ChunkFileError, match="checksum"):
            chunk.verify()
        # Whoever comes meanwhile opens the file anew.
        with memory.holding(key(1), shelf.opener(1)) as again:
            assert again is not None
            with pytest.raises(ChunkFileError, match="checksum"):
                again.sensitivity()
        assert shelf.opened == [1, 1]
    assert seeds(memory) == []
    assert memory.used_bytes == 0
    path.unlink()
    use(memory, shelf, 1)


def test_what_was_not_read_to_its_end_does_not_stay(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 2)
    with memory.holding(key(1), shelf.opener(1)) as chunk:
        assert chunk is not None
        chunk.encoded(0)
    assert seeds(memory) == []
    assert memory.used_bytes == 0


def test_a_file_that_cannot_be_opened_takes_nothing(shelf: Shelf, tmp_path: Path) -> None:
    memory = with_room_for(shelf, 1)
    missing = tmp_path / "missing"
    with (
        pytest.raises(ChunkFileError, match="missing"),
        memory.holding(key(1), lambda: ChunkFile(missing, model=None)),
    ):
        pass
    assert memory.used_bytes == 0


def test_threads_that_want_the_same_share_the_reading(shelf: Shelf) -> None:
    memory = with_room_for(shelf, 4)
    for seed in range(4):
        shelf.path(seed)
    barrier, faults = Barrier(6), []

    def read(ahead: bool) -> None:
        try:
            barrier.wait()
            for seed in range(4):
                with memory.holding(key(seed), shelf.opener(seed), ahead=ahead) as chunk:
                    assert chunk is not None
                    check(chunk, seed)
        except BaseException as fault:
            faults.append(fault)
            raise

    threads = [Thread(target=read, args=(index < 2,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(shelf.read) == len(set(shelf.read)) == 4 * LAYERS


def test_chunks_of_all_lengths_come_and_go(shelf: Shelf) -> None:
    """Whatever is held, kept or dropped: it is what was stored, and never more than there is."""
    memory = ChunkMemory(Arena(3 * shelf.bytes_of(64), pinned=False))
    numbers = random.Random(0)
    lengths = {seed: numbers.choice([1, 7, 16, 40, 64]) for seed in range(12)}
    faults = []

    def work(own: int) -> None:
        draw = random.Random(own)
        try:
            for _ in range(60):
                with ExitStack() as holds:
                    picked = draw.sample(range(12), 2)
                    for seed in picked:
                        opener = shelf.opener(seed, lengths[seed])
                        chunk = holds.enter_context(
                            memory.holding(key(seed), opener, ahead=draw.random() < 0.3)
                        )
                        if chunk is not None:
                            check(chunk, seed, lengths[seed])
                    assert memory.used_bytes <= 3 * shelf.bytes_of(64)
        except BaseException as fault:
            faults.append(fault)
            raise

    threads = [Thread(target=work, args=(own,)) for own in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    # All of it can be had again.
    memory.needed = frozenset()
    with memory.holding(key(20), shelf.opener(20, 64)) as chunk:
        assert chunk is not None
        check(chunk, 20, 64)


def test_an_arena_hands_out_what_was_given_back() -> None:
    arena = Arena(8 * ALIGNMENT, pinned=False)
    places = [arena.take(ALIGNMENT) for _ in range(8)]
    assert places == [index * ALIGNMENT for index in range(8)]
    assert arena.take(1) is None
    assert arena.used_bytes == 8 * ALIGNMENT
    for index in (1, 3, 2):
        arena.give(index * ALIGNMENT, ALIGNMENT)
    assert not arena.would_fit(5 * ALIGNMENT, [(0, ALIGNMENT)])
    assert arena.would_fit(5 * ALIGNMENT, [(0, ALIGNMENT), (4 * ALIGNMENT, 1)])
    assert arena.take(3 * ALIGNMENT - 1) == ALIGNMENT
    assert arena.take(1) is None


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MemoryError):
        Arena(1 << 60, pinned=False)
