"""A capturer for tests of precompute: real chunk files in a real store, with made-up KV.

What precompute does with an engine is under test here, not what an engine computes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from semkv_rag.corpus import CaptureItem, CaptureResult, ContextMode, precompute
from semkv_rag.store import ChunkHeader, KVStore, write_chunk

FINGERPRINT = "ab" * 32
WORDS = {word: id_ for id_, word in enumerate(["<unk>", "<s>", *(f"w{n}" for n in range(500))])}
BOS = WORDS["<s>"]


def word_tokenizer(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """One token for each word w0 to w499 and any other; prompts start with <s> when `bos`."""
    tokenizer = Tokenizer(models.WordLevel({**WORDS, ".": len(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


class MadeUpEngine:
    """Writes files of zeros, the last taken item first, as an engine's results come in any order.

    Attributes:
        captured: the items that were written.
        refuse: an item for which it returns words cannot be written.
        before_write: called before each file is written.
    """

    fingerprint = FINGERPRINT
    max_model_len = 64
    kv_bytes_per_token = 2 * 2 * 4

    def __init__(self, store: KVStore, *, bos: bool = True) -> None:
        self.store = store
        self.tokenizer = word_tokenizer(bos=bos)
        self.captured: list[CaptureItem] = []
        self.refuse: Callable[[CaptureItem], str | None] = lambda _: None
        self.before_write: Callable[[], None] = lambda: None

    def capture(
        self, items: Iterable[CaptureItem], *, in_flight: int = 64
    ) -> Iterator[CaptureResult]:
        waiting = iter(items)
        while batch := list(islice(waiting, in_flight)):
            for item in reversed(batch):
                if error := self.refuse(item):
                    yield CaptureResult(item, 0, error)
                    continue
                self.before_write()
                size = self._write(item)
                self.captured.append(item)
                yield CaptureResult(item, size)

    def _write(self, item: CaptureItem) -> int:
        header = ChunkHeader(
            id=item.id,
            model=self.fingerprint,
            namespace=item.namespace,
            kind=item.kind,
            tokens=item.tokens,
            context=item.context,
            dtype="float32",
            layers=1,
        )
        rows = torch.zeros(len(item.tokens), 1, 2)
        path = self.store.path(self.fingerprint, item.namespace, item.id)
        return write_chunk(path, header, [(rows, rows)])

    def texts(self) -> list[str]:
        """The texts of the captured chunks, sorted."""
        return sorted(self.tokenizer.decode(item.tokens) for item in self.captured)


def precompute_until_killed(
    root: Path, folder: Path, chunks: int, context: Sequence[ContextMode] = ("prefix",)
) -> None:
    """Precompute a folder in a process of its own, which is killed once it has written some chunks."""
    killed = multiprocessing.get_context("fork").Process(
        target=_kill_yourself, args=(root, folder, chunks, context)
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL


def _kill_yourself(root: Path, folder: Path, chunks: int, context: Sequence[ContextMode]) -> None:
    with KVStore(root) as store:
        engine = MadeUpEngine(store)

        def kill() -> None:
            if len(engine.captured) == chunks:
                os.kill(os.getpid(), signal.SIGKILL)

        engine.before_write = kill
        precompute(engine, [folder], chunk_tokens=8, context=context)
