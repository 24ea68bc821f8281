"""Damaged and forged files of the store, made from small sound ones, and what may become of them."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from semkv_rag.errors import StoreError
from semkv_rag.store import (
    ChunkFile,
    ChunkKey,
    KVStore,
    StateFile,
    chunk_id,
    state_id,
    write_chunk,
)
from semkv_rag.store.files.state_file import write_state
from tests.store import made
from tests.store.forging import PREFIX

BUDGET_SECONDS = 2.0
"""Processor time for one file: opening it, reading all of it, and verifying it."""

MEMORY_BYTES = 512 << 20
"""Address space for all that a process does with the files."""

LARGE_BYTES = 256 << 20
"""Of a sparse file that may be larger than the memory; none is made between the two sizes."""

LONGEST_MESSAGE = 1000
"""Characters of an error's text, whatever stands in the file that it is about."""

KEYS = ["ab" * 32, "cd" * 32, "ef" * 32]
Document: TypeAlias = dict[str, Any]
Content: TypeAlias = tuple[object, list[bytes]]
"""What a file says of itself, and the bytes of its tensors in their order."""

# Forked: a spawned one would import torch for seconds before it does anything.
_processes = multiprocessing.get_context("fork")

_VALUES: list[object] = [
    None, True, False, 0, -1, 1, 2, 7, 16, 1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63,
    1 << 64, 1 << 200, -(1 << 63), -(1 << 64), 0.5, -0.0, 8.0, 1e308, float("nan"), float("inf"),
    float("-inf"), "", "0", "-1", "8", "1e999", "nan", "inf", "١٢", "0x10", " 3 ", "1_0", "9" * 4300,
    "9" * 5000, "a", "\0", "\ud800", "\udfff\ud800", "漢字", "é" * 200, "../../etc", "a" * 100_000,
    "\x1b[2J", "F8_E4M3", "F16", "BF16", "F32", "I8", "U8", "I32", "bfloat16", "int32", "float64",
    [], {}, [0], [0, 0], [-1, 1], [8, 0, 4], [0, 0, 0], [1, 1, 1], [16, 0, 1 << 62],
    [16, 0, 1 << 63], [16, 0, 1 << 200], [16, 1 << 31, 0], [16, -2, -4], [16.0, 2.0, 4.0],
    ["16", "2", "4"], [16, 2, 4, 1], [float("inf")], [float("nan"), 0], [0, float("inf")],
    [1e400, 1], [[16], [2], [4]], [None], [True, 2, 4], {"a": 1, "b": 2}, [0, 1 << 62],
    [0] * 10_000, "semkv.chunk", "semkv.state", "1", "document", "prompt",
]  # fmt: skip

_PIECES = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1E400", b"-0", b"null", b"true",
    b"\\ud800", b"\\u0000", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b'"', b",", b":",
    b"{", b"}", b"[", b"]", b"{}", b"[]", b'""', b"9", b"0", b"9" * 5000, b"[" * 5000, b'{"":' * 5000,
    b'"__metadata__":{},', b'"__metadata__":null,', b'"__metadata__":[],', b'"tokens":0,', b" " * 5000,
    b'"xxh3":"",', b'"format_version":"3",', b'"' + b"a" * 50_000 + b'":', b"[]," * 50_000,
]  # fmt: skip


@dataclass(frozen=True)
class Sound:
    """A file as it was written."""

    kind: type[ChunkFile | StateFile]
    data: bytes
    content: Content

    @property
    def begin(self) -> int:
        """Where its data section begins."""
        return 8 + int.from_bytes(self.data[:8], "little")

    @property
    def document(self) -> Document:
        """Its header, parsed anew."""
        parsed: Document = json.loads(self.data[8 : self.begin])
        return parsed


@dataclass(frozen=True)
class Mutant:
    """What becomes of a sound file.

    Attributes:
        data: its first bytes.
        size: the file's size; what follows `data` is a hole.
        forged: whether checksums were made anew.
    """

    data: bytes
    forged: bool
    size: int = 0


def sound_files(folder: Path) -> list[Sound]:
    """Small chunk files and state files of all dtypes."""
    path = folder / "sound.safetensors"
    files: list[Sound] = []
    dtypes = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
    for number, dtype in enumerate(dtypes):
        header = made.header(number, dtype=dtype, context=number % 4, layers=1 + number % 3)
        write_chunk(path, header, made.layers(header, number), made.sensitivity(header, number))
        files.append(_sound(ChunkFile, path))
    for number, dtype in enumerate(dtypes[:3]):
        state = torch.rand(5, 8, generator=torch.Generator().manual_seed(number)) - 0.5
        write_state(path, made.MODEL, "default", KEYS[number], state.to(getattr(torch, dtype)))
        files.append(_sound(StateFile, path))
    return files


def _sound(kind: type[ChunkFile | StateFile], path: Path) -> Sound:
    with kind(path, model=made.MODEL) as file:
        return Sound(kind, path.read_bytes(), content_of(file))


def content_of(file: ChunkFile | StateFile) -> Content:
    """All of a file, read through its public methods."""
    if isinstance(file, StateFile):
        tensors = [file.state()]
        _require_finite(tensors)
        return asdict(file.header), [_bytes(tensor) for tensor in tensors]
    header = file.header
    tensors = [tensor for layer in range(header.layers) for tensor in file.layer(layer)]
    assert all(tensor.shape[0] == len(header.tokens) for tensor in tensors)
    _require_finite(tensors)
    if (sensitivity := file.sensitivity()) is not None:
        assert sensitivity.shape == (header.layers, len(header.tokens))
        tensors.append(sensitivity)
    tokens = [header.tokens.tobytes(), header.context.tobytes()]
    said = {
        name: value for name, value in asdict(header).items() if name not in ("tokens", "context")
    }
    return said, tokens + [_bytes(tensor) for tensor in tensors]


def _require_finite(tensors: Iterable[Tensor]) -> None:
    assert all(bool(tensor.float().isfinite().all()) for tensor in tensors)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.nbytes else b""


# Damage: the bytes change, and no checksum with them.


def _flip(rng: random.Random, sound: Sound) -> Mutant:
    data = bytearray(sound.data)
    for _ in range(rng.choice((1, 1, 2, 50))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return Mutant(bytes(data), forged=False)


def _overwrite(rng: random.Random, sound: Sound) -> Mutant:
    begin = rng.randrange(len(sound.data))
    length = rng.randrange(1, rng.choice((9, 600)))
    run = rng.choice((rng.randbytes(length), bytes(length), b"\xff" * length, rng.choice(_PIECES)))
    data = sound.data[:begin] + run + sound.data[begin + len(run) :]
    return Mutant(data[: len(sound.data)], forged=False)


def _splice(rng: random.Random, sound: Sound) -> Mutant:
    begin, end = sorted(rng.randrange(len(sound.data) + 1) for _ in range(2))
    data = sound.data
    pieces = (b"", data[begin:end] * 2, rng.choice(_PIECES) + data[begin:end])
    return Mutant(data[:begin] + rng.choice(pieces) + data[end:], forged=False)


def _truncate(rng: random.Random, sound: Sound) -> Mutant:
    return Mutant(sound.data[: rng.randrange(len(sound.data))], forged=False)


def _extend(rng: random.Random, sound: Sound) -> Mutant:
    more = rng.choice((b"\0", rng.randbytes(rng.randrange(1, 5000)), sound.data))
    return Mutant(sound.data + more, forged=False)


def _grow_sparse(rng: random.Random, sound: Sound) -> Mutant:
    data = sound.data if rng.random() < 0.5 else _prefixed(rng, sound).data
    return Mutant(data, forged=False, size=len(data) + (1 << rng.randrange(41)))


def _prefixed(rng: random.Random, sound: Sound) -> Mutant:
    length = sound.begin - 8
    near = max(0, length + rng.randrange(-70, 70))
    of_any_size = rng.randrange(1 << rng.randrange(1, 65))
    prefix = rng.choice((near, of_any_size, 4 << 20, (4 << 20) + 1, (1 << 64) - 1))
    return Mutant(prefix.to_bytes(8, "little") + sound.data[8:], forged=False)


# Forgery: all checksums are right, as far as what was changed leaves a place for them.


def _with_header(text: bytes, data: bytes, size: int = 0) -> Mutant:
    """A file with a header of this JSON text, whose first characters become those of any header."""
    tail = text[len(PREFIX) + 16 :]
    header = PREFIX + xxh3_64_hexdigest(tail).encode() + tail
    begin = 8 + len(header)
    whole = len(header).to_bytes(8, "little") + header + data
    return Mutant(whole, forged=True, size=begin + size if size else 0)


def _text(rng: random.Random, document: Document) -> bytes:
    ascii_only = rng.random() < 0.7
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=ascii_only)
    return text.encode(errors="surrogatepass") + b" " * rng.choice((0, 0, 1, 63))


def _edit(rng: random.Random, sound: Sound) -> Mutant:
    document = sound.document
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _edit_once(rng, document)
    if rng.random() < 0.3:
        _give_right_id(document, sound)
    return _with_header(_text(rng, document), sound.data[sound.begin :])


def _edit_once(rng: random.Random, document: Document) -> None:
    if not document:
        return
    place = rng.choice(list(document))
    inner = document[place]
    if not isinstance(inner, dict) or not inner or rng.random() < 0.15:
        _change(rng, document, place)
        return
    names = [name for name in inner if name != "xxh3"] or list(inner)
    name = rng.choice(names)
    value = inner[name]
    if isinstance(value, list) and value and rng.random() < 0.5:
        value[rng.randrange(len(value))] = rng.choice(_VALUES)
        return
    _change(rng, inner, name)


def _change(rng: random.Random, inner: Document, name: str) -> None:
    match rng.randrange(8):
        case 0:
            del inner[name]
        case 1:
            inner[rng.choice(("", "a" * 50_000, "\ud800", "0002.k", "xxh3:tokens", name + "x"))] = (
                inner.pop(name)
            )
        case 2:
            inner[name] = inner[rng.choice(list(inner))]
        case 3:
            inner[name] = [inner[name]] * rng.choice((1, 2, 1000))
        case 4 if name != "__metadata__":  # to the end of the header
            inner[name] = inner.pop(name)
        case _:
            value = rng.choice(_VALUES)
            inner[name] = (
                str(value) if isinstance(inner[name], str) and rng.random() < 0.7 else value
            )


def _give_right_id(document: Document, sound: Sound) -> None:
    """So that what is behind the check of the id is reached, too."""
    metadata = document.get("__metadata__")
    try:
        assert isinstance(metadata, dict)
        model, namespace = metadata["model"], metadata["namespace"]
        if sound.kind is StateFile:
            metadata["id"] = state_id(model, namespace, metadata["key"])
        else:
            tokens, context = (np.frombuffer(part, np.int32) for part in sound.content[1][:2])
            metadata["id"] = chunk_id(model, namespace, context, tokens)
    except (AssertionError, AttributeError, KeyError, StoreError, TypeError, ValueError):
        pass  # it has no id


def _edit_text(rng: random.Random, sound: Sound) -> Mutant:
    text = sound.data[8 : sound.begin]
    for _ in range(rng.choice((1, 1, 2, 5))):
        begin = rng.randrange(len(PREFIX) + 16, max(len(text), len(PREFIX) + 17))
        end = begin + rng.choice((0, 0, 1, rng.randrange(40)))
        if rng.random() < 0.3:
            # Where a value stands, so that the JSON stays whole more often.
            begin = text.find(b":", begin) + 1 or begin
            end = begin + len(re.split(rb"[],}]", text[begin:], maxsplit=1)[0])
        text = text[:begin] + rng.choice((*_PIECES, rng.randbytes(2))) + text[end:]
    return _with_header(text, sound.data[sound.begin :])


def _repeat_keys(rng: random.Random, sound: Sound) -> Mutant:
    """The same key twice, with another value; readers differ in which one counts."""
    document = sound.document
    name = rng.choice(list(document))
    other = dict(document[name]) if rng.random() < 0.8 else {}
    _edit_once(rng, {"again": other})
    more = json.dumps(name).encode() + b":" + json.dumps(other).encode()
    text = sound.data[8 : sound.begin].rstrip()[:-1]
    return _with_header(text + b"," + more + b"}", sound.data[sound.begin :])


def _of_many(rng: random.Random, sound: Sound) -> Mutant:
    """A header near its greatest length, of tensors that hold nothing."""
    document = sound.document
    metadata = document["__metadata__"]
    count = rng.choice((100, 5000, 12_000))
    width = rng.choice((0, 2))
    dtype = document.get("0000.k", {"dtype": "F16"})["dtype"]
    first = max(entry["data_offsets"][1] for name, entry in document.items() if name[0] != "_")
    for layer in range(int(metadata.get("layers", 0)), count):
        for part in "kv":
            document[f"{layer:04d}.{part}"] = {
                "dtype": dtype, "shape": [16, 0, width], "data_offsets": [first, first]
            }  # fmt: skip
            metadata[f"xxh3:{layer:04d}.{part}"] = xxh3_64_hexdigest(b"")
    metadata["layers"] = str(count)
    return _with_header(_text(rng, document), sound.data[sound.begin :])


def _replace_numbers(rng: random.Random, sound: Sound) -> Mutant:
    """Other bytes in the place of a tensor's, with their checksum."""
    document = sound.document
    name = rng.choice([name for name in document if name != "__metadata__"])
    begin, end = document[name]["data_offsets"]
    data = bytearray(sound.data[sound.begin :])
    width = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2}.get(document[name]["dtype"], 1)
    dtype = {4: torch.float32, 2: torch.float16, 1: torch.float8_e5m2}[width]
    if document[name]["dtype"] == "BF16":
        dtype = torch.bfloat16
    special = rng.choice(("nan", "inf", "-inf", "denormal", "huge", "-huge", "bytes", "any"))
    if special in ("bytes", "any"):
        content = rng.randbytes(width)
    else:
        limits = torch.finfo(dtype)
        number = {
            "denormal": limits.smallest_normal / 2, "huge": limits.max, "-huge": limits.min
        }.get(special) or float(special)  # fmt: skip
        content = _bytes(torch.tensor([number]).to(dtype))
    count = (end - begin) // width
    if special == "any":
        data[begin:end] = rng.randbytes(end - begin)
    elif count:
        for place in rng.sample(range(count), rng.choice((1, count))):
            data[begin + place * width : begin + (place + 1) * width] = content
    document["__metadata__"][f"xxh3:{name}"] = xxh3_64_hexdigest(bytes(data[begin:end]))
    return _with_header(_text(rng, document), bytes(data))


def _reshape(rng: random.Random, sound: Sound) -> Mutant:
    """Another shape, with offsets and checksums that fit it; the file is as large as they say."""
    document = sound.document
    tensors = {name: entry for name, entry in document.items() if name != "__metadata__"}
    data = sound.data[sound.begin :]
    sides = (0, 1, 2, 3, 5, 16, 1000, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 65)
    chosen = rng.choice(list(tensors))
    for name in tensors if rng.random() < 0.2 else [chosen]:
        shape = tensors[name]["shape"]
        shape[rng.randrange(len(shape))] = rng.choice(sides)
        if rng.random() < 0.3:
            shape[rng.randrange(len(shape))] = 0
        rng.shuffle(shape)
    whole, offset = b"", 0
    for name, entry in tensors.items():
        width = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2}.get(entry["dtype"], 1)
        size = width
        for side in entry["shape"]:
            size *= side
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [offset, offset + size]
        if offset == len(whole):  # nothing large before
            content = data[begin:end][:size].ljust(min(size, 1 << 20), b"\0")
            whole += content
            if len(content) == size:
                document["__metadata__"][f"xxh3:{name}"] = xxh3_64_hexdigest(content)
        offset += size
    if offset > 1 << 40 or 32 << 20 < offset < 2 * MEMORY_BYTES:
        offset = 0  # no file is so large, or reading it takes long
    return _with_header(_text(rng, document), whole, offset)


_MUTATIONS: list[Callable[[random.Random, Sound], Mutant]] = [
    *(_flip, _overwrite, _splice, _truncate, _extend, _grow_sparse, _prefixed),
    *(
        _edit,
        _edit,
        _edit,
        _edit_text,
        _edit_text,
        _repeat_keys,
        _replace_numbers,
        _reshape,
        _reshape,
    ),
]
_RARE = _of_many  # takes a tenth of a second, where the others take a thousandth


def mutate(number: int, sound: list[Sound]) -> tuple[str, Sound, Mutant]:
    """The mutant of this number, what was done to it, and of which file it is."""
    rng = random.Random(number)
    mutation = _RARE if rng.random() < 0.002 else rng.choice(_MUTATIONS)
    of = rng.choice(sound)
    return mutation.__name__.strip("_"), of, mutation(rng, of)


def put_in(path: Path, mutant: Mutant) -> None:
    """Write it, in place of a file there."""
    path.unlink(missing_ok=True)
    path.write_bytes(mutant.data)
    if mutant.size > len(mutant.data):
        os.truncate(path, mutant.size)


@dataclass
class Outcome:
    """What became of many files.

    Attributes:
        counts: by what was done, and what it led to.
        faults: numbers of mutants, and what they did that they must not do.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: int = -1
    faults: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Those of another process, too."""
        self.counts += other.counts
        self.faults += other.faults
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest

    def total(self, result: str) -> int:
        """How many came to this, whatever was done to them."""
        return sum(count for (_, came_to), count in self.counts.items() if came_to == result)


def fuzz(numbers: range, folder: Path, processes: int = 1) -> Outcome:
    """Open and read the mutants of these numbers, in processes with little memory.

    Raises:
        AssertionError: a process died of one; says of which.
    """
    sound = sound_files(folder)
    running = []
    for part in range(processes):
        ours, theirs = _processes.Pipe(duplex=False)
        now = _processes.Value("q", -1)
        own = folder / str(part)
        own.mkdir()
        work = partial(_fuzz, numbers[part::processes], sound, own, theirs, now)
        process = _processes.Process(target=work, daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours, now))
    outcome = Outcome()
    for process, ours, now in running:
        try:
            outcome.add(ours.recv())
        except EOFError:
            raise AssertionError(f"a process died of mutant {now.value}") from None
        process.join()
    return outcome


def _fuzz(numbers: range, sound: list[Sound], folder: Path, told: Connection, now: Any) -> None:
    gc.freeze()  # or a collection goes through all that the tests' process holds, in some file's time
    torch.set_num_threads(1)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    outcome = Outcome()
    path = folder / "file.safetensors"
    for number in numbers:
        now.value = number
        done, of, mutant = mutate(number, sound)
        put_in(path, mutant)
        started = time.process_time()
        try:
            result = become(path, of, mutant)
        except Exception as error:
            result = "fault"
            outcome.faults.append((number, f"{done}: {error!r}"[:300]))
        took = time.process_time() - started
        if took > outcome.slowest_s:
            outcome.slowest_s, outcome.slowest = took, number
        if took > BUDGET_SECONDS:
            outcome.faults.append((number, f"{done}: took {took:.1f} s"))
        outcome.counts[done, result] += 1
    with closing(told):
        told.send(outcome)


def repair_a_store(store: KVStore, numbers: range, sound: list[Sound]) -> int:
    """Put mutants in the places of promised files, and have the store repaired; how many it lost.

    Raises:
        AssertionError: it does not promise sound files only, or still has something to repair.
    """
    lost = 0
    for number in numbers:
        for of in sound:
            _promise(store, of)
        for part, of in enumerate(sound):
            mutant = mutate(number * len(sound) + part, [of])[2]
            if mutant.size <= LARGE_BYTES:  # verifying takes as long as its hole is large
                put_in(_place(store, of), mutant)
        report = store.verify(repair=True)
        lost += len(report.problems)
        again = store.verify()
        assert again.problems == (), number
        # What a newer version wrote is nobody's to remove.
        assert all("newer version" in notice.text for notice in again.notices), number
    return lost


def _place(store: KVStore, of: Sound) -> Path:
    metadata = of.document["__metadata__"]
    if of.kind is StateFile:
        return store.states.path(metadata["model"], metadata["namespace"], metadata["key"])
    return store.path(metadata["model"], metadata["namespace"], metadata["id"])


def _promise(store: KVStore, of: Sound) -> None:
    path = _place(store, of)
    path.parent.mkdir(parents=True, exist_ok=True)
    put_in(path, Mutant(of.data, forged=False))
    if of.kind is StateFile:
        store.states.promise([path])
        return
    metadata = of.document["__metadata__"]
    key = ChunkKey(metadata["id"], metadata["model"], metadata["namespace"])
    assert store.add([key]) == {key.id}


def become(path: Path, of: Sound, mutant: Mutant) -> str:
    """What came of a file: `refused`, `same` or, with other checksums, `forged`.

    Raises:
        Exception: something that must not be.
    """
    try:
        file = of.kind(path, model=None)
    except StoreError as error:
        _check_error(error, mutant)
        return "refused"
    with file:
        faults = []
        content: Content | None = None
        try:
            content = content_of(file)
        except StoreError as error:
            _check_error(error, mutant)
            faults.append(error)
        if mutant.size > LARGE_BYTES:
            assert faults, "it was read, and does not fit the memory"
            return "refused"  # verifying takes as long as reading so much does
        try:
            file.verify()
        except StoreError as error:
            _check_error(error, mutant)
            faults.append(error)
    assert len(faults) != 1, f"reading and verifying do not agree: {faults[0]}"
    if content is None:
        return "refused"
    if content == of.content:
        return "same"
    assert mutant.forged, "damage was not seen"
    stored = path.read_bytes()
    begin = 8 + int.from_bytes(stored[:8], "little")
    assert b"".join(content[1]) == stored[begin:], "what was read is not what stands there"
    return "forged"


def _check_error(error: StoreError, mutant: Mutant) -> None:
    assert len(str(error)) <= LONGEST_MESSAGE, f"an error of {len(str(error))} characters"
    if isinstance(error.__cause__, MemoryError):
        assert mutant.size > LARGE_BYTES, "too much memory was asked for"
