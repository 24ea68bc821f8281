"""Converting stored chunks to another codec, in place.

A chunk's file is read, encoded anew, and replaced as a whole; then its row says the new codec, and all
who follow the store are told. So a run that is killed has chunks of either codec, and the next goes on
where it was. In between the row may say the former codec. An engine compares it with the file
and computes such a request, see `ChunkFiles`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from semkv_rag.errors import ChunkFileError, OptionError, StoreError
from semkv_rag.store.codecs import Codec, codec_named
from semkv_rag.store.files.chunk_file import write_chunk
from semkv_rag.store.files.paths import chunk_paths
from semkv_rag.store.gone import GoneFile, unlink
from semkv_rag.store.index import chunks, promises
from semkv_rag.store.index.database import Database
from semkv_rag.store.records import ChunkRecord, RecodeReport
from semkv_rag.store.upkeep.contents import Contents


def recode(
    database: Database,
    contents: Contents,
    codec_name: str,
    model: str | None,
    namespace: str | None,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> RecodeReport:
    """What `KVStore.recode` does."""
    codec = codec_named(codec_name)
    if not dry_run:
        database.require_writing()
    counts = Counter[str]()
    before = 0
    for page in contents.pages(model, namespace):
        counts.update(record.codec for record in page)
        before += sum(record.bytes for record in page)
    _require_whole(counts, codec)
    to_do = counts.total() - counts[codec.name]
    if dry_run:
        return RecodeReport(to_do, counts[codec.name], before, before, ())
    done, after, failures = 0, 0, list[tuple[str, str]]()
    for page in contents.pages(model, namespace):
        for record in page:
            if record.codec == codec.name:
                after += record.bytes
                continue
            try:
                after += _Chunk(database, contents, record, codec).recode()
                done += 1
            except StoreError as error:
                failures.append((record.id, str(error)))
                after += record.bytes
            if progress is not None:
                progress(done + len(failures), max(to_do, done + len(failures)))
    return RecodeReport(done, counts[codec.name], before, after, tuple(failures))


def _require_whole(counts: Counter[str], codec: Codec) -> None:
    """Raise StoreError when a lossy codec has left out something that cannot be brought back."""
    lost = [
        f"{counts[name]} as {name}"
        for name in sorted(counts)
        if name != codec.name and not _is_lossless(name)
    ]
    if lost:
        raise StoreError(
            f"chunks cannot become {codec.name}: there are {', '.join(lost)}, and what that left out is"
            " not in the store. Remove their documents (semkv rm), and precompute them again with"
            f" --codec {codec.name}; or recode another --namespace or --model"
        )


def _is_lossless(name: str) -> bool:
    try:
        return codec_named(name).lossless
    except OptionError:  # a newer version's
        return False


class _Chunk:
    """One chunk, with its files of all ranks."""

    def __init__(
        self, database: Database, contents: Contents, record: ChunkRecord, codec: Codec
    ) -> None:
        self._database, self._contents = database, contents
        self._record, self._codec = record, codec

    def recode(self) -> int:
        """Recode it; the bytes that it takes now.

        Raises:
            StoreError: a file is damaged, or the disk is full; the chunk is as it was, or some ranks are
                recoded.
        """
        paths = chunk_paths(self._contents.root, self._record, self._record.ranks)
        for path in paths:
            self._rewrite(path)
        found = self._contents.find([self._record])
        with self._database.writing() as connection:
            # It may have been evicted meanwhile: then it is not to be promised again.
            there = chunks.find(connection, [self._record.id])
            if there:
                promises.put(connection, [chunk for _, chunk in found])
        if not there:
            files = self._contents.files
            gone = [
                GoneFile(self._record.id, path, seen, files)
                for path in paths
                if (seen := files.seen(path))
            ]
            unlink(self._database, self._contents.root, gone)
            return 0
        if not found:
            raise StoreError("its files went while it was recoded")
        return found[0][1].bytes

    def _rewrite(self, path: Path) -> None:
        record = self._record
        files = self._contents.files
        with files.chunk(path, model=record.model, chunk_id=record.id) as file:
            if file.codec.name == self._codec.name:
                return  # by a run that was killed before it changed the row
            if not file.codec.lossless:
                raise ChunkFileError(
                    f"chunk file {path.name} is stored as {file.codec.name}, whatever the index says:"
                    " semkv verify --repair"
                )
            layers = [file.layer(index) for index in range(file.header.layers)]
            header = replace(file.header, codec=self._codec.name)
            sensitivity = file.sensitivity()

        def write_to(place: Path) -> int:
            return write_chunk(place, header, layers, sensitivity)

        try:
            files.write(path, write_to)
        except OSError as error:
            raise StoreError(f"{path.name} cannot be written: {error.strerror}") from error
