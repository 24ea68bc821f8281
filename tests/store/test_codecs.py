"""Codecs: what they give back, at what size, and files of theirs that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from semkv_rag.errors import ChunkFileError, OptionError, StoreError, StoreVersionError
from semkv_rag.store import ChunkFile, KVStore, write_chunk
from semkv_rag.store.codecs import EncodedLayer, Scratch, codec_named, codec_names, register_codec
from semkv_rag.store.codecs.codec import LOSSY_DTYPES
from semkv_rag.store.codecs.coders import Rows8, Same
from semkv_rag.store.codecs.pairs import PairCodec
from semkv_rag.store.files.header import format_of, metadata_of
from semkv_rag.store.files.tensor_writer import write_tensors
from tests.store import made
from workbench.decoded import decoded_in_torch

LOSSY = [name for name in codec_names() if name != "plain"]
STEPS = {"fp8": (1 / 16, 1 / 16), "int8": (0.5 / 127, 0.5 / 127), "k8v4": (0.5 / 127, 0.5 / 7.5)}
STEPS["int4"] = (0.5 / 7.5, 0.5 / 7.5)
"""The largest error of K and of V, as a share of the largest number that shares a scale with it."""


def encoded(codec: str, keys: torch.Tensor, values: torch.Tensor) -> EncodedLayer:
    chosen = codec_named(codec)
    parts = chosen.encode(keys, values)
    shapes = [(int(one.shape[1]), int(one.shape[2])) for one in (keys, values)]
    layout = chosen.layout(len(keys), shapes[0], shapes[1], keys.dtype)
    found = {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}
    assert found == layout and tuple(found) == chosen.names
    assert chosen.shapes({name: shape for name, (_, shape) in found.items()}) == tuple(shapes)
    assert chosen.fault(parts, keys.dtype) is None
    return EncodedLayer(chosen, parts, keys.dtype)


@st.composite
def tensors(draw: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, of heads that need not be alike, with numbers of any size."""
    tokens = draw(st.sampled_from([1, 2, 3, 63, 64, 65, 130, 513]))
    dtype = draw(st.sampled_from(LOSSY_DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    both = []
    for _ in range(2):
        shape = (tokens, draw(st.integers(1, 3)), draw(st.sampled_from([4, 12, 32, 64])))
        numbers = torch.randn(shape, generator=generator)
        size = draw(st.sampled_from([0.0, 1e-40, 1e-6, 1.0, 3e4, 1e30, 3e38]))
        numbers = (numbers * size).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        if draw(st.booleans()):
            numbers[:, :, 0] += draw(st.sampled_from([0.0, 5.0, -300.0]))  # as keys have
        if draw(st.booleans()):
            numbers[draw(st.integers(0, tokens - 1))] = torch.finfo(dtype).max
        both.append(numbers.to(dtype))
    return both[0], both[1]


@pytest.mark.parametrize("codec", LOSSY)
@settings(max_examples=40, deadline=None)
@given(both=tensors())
def test_what_comes_back_is_finite_and_near(
    codec: str, both: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for right, found, step in zip(both, encoded(codec, *both).decode(), STEPS[codec], strict=True):
        assert found.dtype == right.dtype and found.shape == right.shape
        assert bool(found.isfinite().all())
        info = torch.finfo(right.dtype)
        held = right.double().clamp(-min(0.96 * info.max, 1e38), min(0.96 * info.max, 1e38))
        # Rounded to the dtype, and scales and middles to bfloat16. The least scale is 1e-38 / 256.
        largest = held.abs().amax()
        bound = (2 * step * 1.02 + 0.01) * largest + 1e-38 + 2 * info.smallest_normal
        assert bool(((found.double() - held).abs() <= bound).all())


@pytest.mark.parametrize(("codec", "most"), [("fp8", 0.03), ("int8", 0.008), ("int4", 0.11)])
def test_ordinary_kv_comes_back_as_near_as_its_bits(codec: str, most: float) -> None:
    torch.manual_seed(0)
    keys = torch.randn(500, 3, 64) + 8 * torch.randn(3, 64)  # channels of a size of their own
    values = torch.randn(500, 3, 64) * torch.rand(500, 3, 1)
    for right, found in zip((keys, values), encoded(codec, keys, values).decode(), strict=True):
        # A float is as near as it is large itself; the others, as the numbers of a channel differ.
        size = right if codec == "fp8" else right - right.mean(0)
        assert float((found - right).norm() / size.norm()) < most


@settings(max_examples=30, deadline=None)
@given(both=tensors(), cut=st.tuples(st.integers(0, 600), st.integers(1, 600)))
@pytest.mark.parametrize("codec", codec_names())
def test_some_rows_are_those_of_all(
    codec: str, both: tuple[torch.Tensor, torch.Tensor], cut: tuple[int, int]
) -> None:
    layer = encoded(codec, *both)
    begin = cut[0] % len(both[0])
    rows = slice(begin, min(begin + cut[1], len(both[0])))
    scratch = Scratch()
    layer.decode(scratch=scratch)  # what is left in the memory does not matter
    whole = layer.decode()
    for all_of_it, some in zip(whole, layer.decode(rows, scratch=scratch), strict=True):
        assert torch.equal(all_of_it[rows], some)


@pytest.mark.parametrize("cut", [slice(0, 500), slice(70, 71), slice(63, 300)])
@pytest.mark.parametrize("size", [64, 20])
@pytest.mark.parametrize("codec", codec_names())
def test_a_kernel_is_told_how_to_decode(codec: str, size: int, cut: slice) -> None:
    torch.manual_seed(0)
    keys, values = 5 + torch.randn(600, 3, size), torch.randn(600, 2, size)
    layer = encoded(codec, keys, values)
    coded = layer.coded(cut)
    assert coded is not None
    for numbers, right in zip(coded, layer.decode(cut), strict=True):
        assert numbers.shape == right.shape[1:]
        torch.testing.assert_close(decoded_in_torch(numbers, right.dtype), right)


def test_sizes() -> None:
    shape, told = (8, 128), {}
    for name in codec_names():
        told[name] = codec_named(name).bytes_per_token(shape, shape, torch.bfloat16)
    assert told["plain"] == 4096
    assert told["plain"] / told["int8"] > 1.96
    assert told["plain"] / told["fp8"] > 1.96
    assert told["plain"] / told["int4"] > 3.3
    assert told["plain"] / told["k8v4"] > 2.4


def test_a_name_is_of_one_codec() -> None:
    with pytest.raises(OptionError, match="another one"):
        register_codec(PairCodec("int8", Same(), Rows8()))
    register_codec(codec_named("int8"))
    with pytest.raises(OptionError, match="use one of plain, fp8"):
        codec_named("int7")


@pytest.mark.parametrize("codec", codec_names())
def test_files(tmp_path: Path, codec: str) -> None:
    header = replace(made.header(1, tokens=67), codec=codec)
    layers, codes = made.layers(header), made.sensitivity(header)
    path = tmp_path / "chunk.safetensors"
    size = write_chunk(path, header, layers, codes)
    with ChunkFile(path, model=made.MODEL) as file:
        file.verify()
        file.require([((2, 4), (2, 4))] * header.layers)
        assert (file.header.codec, file.size_bytes) == (codec, size)
        memory = torch.zeros(file.kv_bytes, dtype=torch.uint8)
        first, nothing = file.layers_in(memory, 0, 1)
        second, found = file.layers_in(memory, 1, 2)
        assert nothing is None and found is not None and torch.equal(found, codes)
        for index, one in enumerate([*first, *second]):
            right = encoded(codec, *layers[index]).decode()
            for way in (one.decode(), file.layer(index), file.encoded(index).decode()):
                assert all(map(torch.equal, way, right))
        with pytest.raises(ChunkFileError, match=r"holds \[2, 4\] a token in 0000.v"):
            file.require([((2, 4), (2, 8))] * header.layers)
    names = [f"{layer:04d}.{one}" for layer in (0, 1) for one in codec_named(codec).names]
    assert sorted(load_file(path)) == sorted(["context", "tokens", "sensitivity", *names])
    version = 2 if codec == "plain" else 3
    assert f'"format_version":"{version}"'.encode() in path.read_bytes()


@pytest.mark.parametrize("codec", LOSSY)
def test_what_a_lossy_codec_cannot_hold_is_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "chunk.safetensors"
    header = replace(made.header(1), codec=codec, layers=1)
    odd = torch.zeros(16, 2, 6).bfloat16()
    with pytest.raises(StoreError, match="multiples of 4"):
        write_chunk(path, header, [(odd, odd)])
    small = torch.zeros(16, 2, 4).to(torch.float8_e5m2)
    with pytest.raises(StoreError, match="cannot hold float8_e5m2"):
        write_chunk(path, replace(header, dtype="float8_e5m2"), [(small, small)])
    bad = torch.zeros(16, 2, 4).bfloat16()
    bad[3, 1, 2] = torch.nan
    with pytest.raises(StoreError, match="NaN"):
        write_chunk(path, header, [(bad, bad)])
    assert list(tmp_path.iterdir()) == []


def forged(path: Path, codec: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """A file whose checksums are right and whose tensors are not."""
    header = replace(made.header(1), codec=codec)
    tensors = {
        "tokens": torch.from_numpy(header.tokens),
        "context": torch.from_numpy(header.context),
    }
    for index, layer in enumerate(made.layers(header)):
        parts = codec_named(codec).encode(*layer)
        tensors |= {f"{index:04d}.{name}": part for name, part in parts.items()}
    change(tensors)
    write_tensors(path, format_of(header), metadata_of(header), tensors)


def _bounded() -> list[tuple[str, str]]:
    return [(codec, name) for codec in LOSSY for name in codec_named(codec).bounded]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize(("codec", "name"), _bounded())
def test_scales_and_middles_that_give_no_numbers_are_refused(
    tmp_path: Path, codec: str, name: str, value: float
) -> None:
    path = tmp_path / "chunk.safetensors"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"0001.{name}"].view(-1)[-1] = value
        # A middle is too large where its scale takes it further.
        if name.endswith("middle"):
            tensors[f"0001.{name.replace('middle', 'scale')}"].view(-1)[-1] = 1e37

    forged(path, codec, change)
    with ChunkFile(path, model=made.MODEL) as file:
        file.layer(0)
        with pytest.raises(ChunkFileError, match=r"NaN or infinity|cannot be decoded"):
            file.layer(1)
        memory = torch.zeros(file.kv_bytes, dtype=torch.uint8)
        with pytest.raises(ChunkFileError, match=r"NaN or infinity|cannot be decoded"):
            file.layers_in(memory, 0, 2)
        with pytest.raises(ChunkFileError, match=r"NaN or infinity|cannot be decoded"):
            file.verify()


@pytest.mark.parametrize("codec", LOSSY)
def test_a_negative_scale_is_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "chunk.safetensors"
    forged(path, codec, lambda tensors: tensors["0000.v.scale"].view(-1)[0].fill_(-1.0))
    with ChunkFile(path, model=made.MODEL) as file, pytest.raises(ChunkFileError, match="negative"):
        file.layer(0)


@pytest.mark.parametrize("codec", LOSSY)
def test_tensors_that_do_not_belong_together_are_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "chunk.safetensors"
    for index, name in enumerate(("0000.k", "0001.v.scale", "0001.v")):
        for change in (
            lambda one: one[:-1],
            lambda one: one[..., :-1],
            lambda one: one.view(-1),
            lambda one: one[:0],
            lambda one: one.view(torch.uint8).to(torch.int32),
            lambda one: one.float(),
        ):

            def altered(tensors: dict[str, torch.Tensor], change: Any = change) -> None:
                tensors[name] = change(tensors[name]).contiguous()  # noqa: B023

            forged(path, codec, altered)
            with pytest.raises(ChunkFileError, match="cannot be used"):
                ChunkFile(path, model=made.MODEL)
        assert index < 3

    def without(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["0000.k"]

    def more(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0002.k"] = tensors["0000.k"]

    for changed in (without, more):
        forged(path, codec, changed)
        with pytest.raises(ChunkFileError, match="not those of 2 layers"):
            ChunkFile(path, model=made.MODEL)


def test_formats_and_codecs_that_do_not_go_together(tmp_path: Path) -> None:
    path = tmp_path / "chunk.safetensors"
    header = replace(made.header(1), codec="int8")
    tensors = {"tokens": torch.from_numpy(header.tokens)}
    for version, codec, error, match in (
        (2, "int8", ChunkFileError, "does not go with codec"),
        (3, "plain", ChunkFileError, "does not go with codec"),
        (3, "transform", StoreVersionError, "codec 'transform', which this version does not know"),
    ):
        metadata = metadata_of(header) | {"codec": codec}
        write_tensors(path, replace(format_of(header), version=version), metadata, tensors)
        with pytest.raises(error, match=match):
            ChunkFile(path, model=made.MODEL)


def test_a_file_of_a_codec_that_is_not_known_is_left_alone(store: KVStore) -> None:
    header = made.header(1)
    path = store.path(made.MODEL, "default", header.id)
    other = PairCodec("another", Same(), Same())
    metadata = metadata_of(replace(header, codec=other.name))
    write_tensors(
        path, format_of(replace(header, codec="int8")), metadata, {"tokens": torch.ones(1)}
    )
    report = store.verify(repair=True)
    assert [notice.kind for notice in report.notices] == ["orphan"]
    assert path.exists()


def test_a_plain_file_is_what_it_was(tmp_path: Path) -> None:
    """Versions without codecs read it: format 2, no word of a codec, and the same tensors."""
    header, path = made.header(1), tmp_path / "chunk.safetensors"
    write_chunk(path, header, made.layers(header))
    content = path.read_bytes()
    text = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert text["__metadata__"]["format_version"] == "2"
    assert "codec" not in text["__metadata__"]
