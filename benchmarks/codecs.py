"""What codecs take and lose: bytes, speed, error of K and V, and answers on a real model.

bytes       of a token in a chunk file of 512 tokens in bfloat16, all layers, header and checksums among
            them. Two shapes: the model's, and an 8B model's (32 layers, 8 KV heads of 128)
speed       of encoding and decoding one layer of 512 tokens, in one thread, in memory that is used again:
            GB/s of stored bytes. The codecs take turns, round by round. The same two shapes. Beside it
            the share of each of torch's operations
error       of K and V by layer, ‖decoded - stored‖ / ‖stored‖, over 16 of these chunks
agreement   the preset `balanced` out of each codec's chunks against the same out of plain ones: of the
            tokens of the latter's answer, the share that is the likeliest behind the same tokens. One
            request at a time, nothing in the prefix cache
score       of the answers, RULER's family and questions on articles (benchmarks/quality_real), points;
            and how far it is from the score out of plain chunks, with a 95 % interval over the contexts

    python benchmarks/codecs.py [--model FOLDER] [--contexts 42] [--dtype bfloat16]

Writes build/bench/codecs.json after each context, and codecs.png. A context takes six seconds on two
cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from benchmarks.quality_real import tasks
from benchmarks.quality_real.context import around_passages
from benchmarks.quality_real.report import interval
from semkv_rag import Engine
from semkv_rag.config import ReuseOptions
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.quality.codecs import copy_as, namespace_of
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkFile, ChunkHeader, ChunkKey, KVStore, chunk_id, write_chunk
from semkv_rag.store.codecs import EncodedLayer, Scratch, codec_named, codec_names
from workbench.figures import save, summary

TOKENS, ROUNDS = 512, 40
ERROR_CHUNKS = 16
LARGE = (32, (8, 128))
"""Layers, and `(kv_heads, head_dim)`, of an 8B model such as Qwen3's or Llama 3's."""
MAX_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--contexts", type=int, default=42)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192, help="of each passage, at most")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--name", default="codecs", help="of the output")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "contexts": arguments.contexts,
        "passages": arguments.passages,
        "passage_tokens": arguments.tokens,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            KVStore(folder / "copies") as copies,
            Engine(
                str(arguments.model),
                store=folder / "copies",
                dtype=arguments.dtype,
                max_model_len=2048,
                kv_cache_memory_bytes=1 << 29,
            ) as engine,
            KVStore(folder / "plain") as plain,
        ):
            made = tasks.Maker(
                ROOT / "examples" / "articles",
                engine.tokenizer,
                arguments.tokens,
                0,
                None,
                None,
                None,
            )
            asked = [
                t for n in range(arguments.contexts) for t in made.tasks(n, arguments.passages)
            ]
            prompts = [store(engine, plain, task) for task in asked]
            model = engine.fingerprint
            figures["codecs"] = {
                codec: {"bytes_per_token": {}, "speed": {}} for codec in codec_names()
            }
            for codec in codec_names():
                copy_as(codec, plain, model, "default", copies)
            own = errors(copies, model, figures["codecs"])
            for what, (layers, shape) in {"the model": own, "8B": LARGE}.items():
                rates = speeds(shape)
                for codec, told in figures["codecs"].items():
                    path = folder / "chunk.safetensors"
                    told["bytes_per_token"][what] = file_bytes(path, codec, layers, shape)
                    told["speed"][what] = rates[codec]
            for done, compared in enumerate(answers(engine, asked, prompts), 1):
                for codec, told in compared.items():
                    figures["codecs"][codec] |= told
                figures["contexts"] = done
                save(arguments.name, figures)
    path = save(arguments.name, figures, lambda figure: draw(figure, figures["codecs"]))
    for codec, told in figures["codecs"].items():
        print(codec, {k: v for k, v in told.items() if k != "error"})
    print(f"written to {path.relative_to(ROOT)}")


def store(engine: Engine, plain: KVStore, task: tasks.Task) -> list[int]:
    """Store a task's passages behind the prompt prefix and behind their neighbour; its prompt."""
    tokenizer = engine.tokenizer
    before, after = around_passages(tokenizer)
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
    prefix, separator = encode(before), encode("\n\n")
    prompt, items = list(prefix), list[CaptureItem]()
    for number, passage in enumerate(task.passages):
        prompt += (separator if number else []) + passage.tokens
        contexts = [prefix, passage.left] if passage.left else [prefix]
        for context in contexts:
            left, own = token_array(context), token_array(passage.tokens)
            reference = token_array(prefix) if context is not prefix else None
            id_ = chunk_id(engine.fingerprint, "default", left, own)
            items.append(CaptureItem(id_, "default", "document", own, left, reference))
    assert engine.store is not None
    plain.add_model(engine.fingerprint, {})
    keys = []
    for result in engine.capture(items):
        assert result.error is None, result.error
        id_ = result.item.id
        source = engine.store.path(engine.fingerprint, "default", id_)
        target = plain.path(engine.fingerprint, "default", id_)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():  # not of a passage that an earlier context had
            source.replace(target)
        keys.append(ChunkKey(id_, engine.fingerprint, "default"))
    plain.add(keys)
    return prompt + encode(f"\n\nQuestion: {task.question}\nAnswer:{after}")


def answers(
    engine: Engine, asked: list[tasks.Task], prompts: list[list[int]]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Agreement with the answers out of plain chunks, and the score, by codec, after each context."""
    equal, places = dict.fromkeys(codec_names(), 0), 0
    whole = dict.fromkeys(codec_names(), 0)
    scores: dict[str, list[float]] = {codec: [] for codec in codec_names()}
    full: list[float] = []
    for number, (task, prompt) in enumerate(zip(asked, prompts, strict=True), 1):
        full.append(task.score(ask(engine, prompt, ReuseOptions(enabled=False)).text))
        right: list[int] = []
        for codec in codec_names():
            options = ReuseOptions(namespace=namespace_of(codec))
            answer = ask(engine, prompt, options)
            assert answer.report.codecs == (codec,), answer.report
            tokens = list(answer.token_ids)
            scores[codec].append(task.score(answer.text))
            if codec == "plain":
                right, places = tokens, places + len(tokens)
            if tokens == right:
                equal[codec] += len(right)
                whole[codec] += 1
                continue
            along = engine.score(prompt, right, reuse=options)
            equal[codec] += sum(
                at is not None and max(at, key=lambda token: at[token]) == token
                for at, token in zip(along, right, strict=True)
            )
        print(
            f"{number} of {len(asked)}: {[round(equal[c] / places, 4) for c in equal]}", flush=True
        )
        yield {
            codec: {
                "agreement": equal[codec] / places,
                "compared_tokens": places,
                "equal_answers": whole[codec] / number,
                "score": 100 * statistics.mean(scores[codec]),
                "from_plain": difference(scores[codec], scores["plain"]),
                "full_prefill_score": 100 * statistics.mean(full),
            }
            for codec in codec_names()
        }


def ask(engine: Engine, prompt: list[int], options: ReuseOptions) -> Any:
    engine.reset_prefix_cache()
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    return engine.generate(prompt, sampling=sampling, reuse=options)


def difference(scores: list[float], plain: list[float]) -> list[float]:
    """Points that a score is above plain's, and the ends of the 95 % interval over the contexts."""
    apart = [{"points": 100 * (a - b)} for a, b in zip(scores, plain, strict=True)]
    return interval(apart, lambda rows: statistics.fmean(row["points"] for row in rows))


def file_bytes(path: Path, codec: str, layers: int, shape: tuple[int, int]) -> float:
    """Bytes of a token in a chunk file with sensitivities; bfloat16."""
    empty, tokens = token_array([]), token_array(range(TOKENS))
    model, name = "0" * 64, "default"
    id_ = chunk_id(model, name, empty, tokens)
    header = ChunkHeader(
        id_, model, name, "document", tokens, empty, "bfloat16", layers, codec=codec
    )
    one = (torch.randn(TOKENS, *shape).bfloat16(), torch.randn(TOKENS, *shape).bfloat16())
    sensitivity = torch.zeros(layers, TOKENS, dtype=torch.uint8)
    return write_chunk(path, header, [one] * layers, sensitivity) / TOKENS


def errors(copies: KVStore, model: str, told: dict[str, Any]) -> tuple[int, tuple[int, int]]:
    """Add the relative error of K and V by layer; the number of layers, and the shape of K."""
    right = sorted(copies.chunks(model, namespace_of("plain")), key=lambda one: one.created_at)
    shape = (0, 0)
    for codec in told:
        sums: dict[int, Tensor] = {}
        for record in right[:ERROR_CHUNKS]:
            path = copies.path(model, namespace_of("plain"), record.id)
            with ChunkFile(path, model=model) as one:
                own = one.header
                id_ = chunk_id(model, namespace_of(codec), own.context, own.tokens)
                with ChunkFile(copies.path(model, namespace_of(codec), id_), model=model) as other:
                    for layer in range(own.layers):
                        pairs = list(zip(one.layer(layer), other.layer(layer), strict=True))
                        shape = (pairs[0][0].shape[1], pairs[0][0].shape[2])
                        sums[layer] = sums.get(layer, torch.zeros(2, 2)) + torch.stack(
                            [_squares(b.float() - a.float(), a.float()) for a, b in pairs]
                        )
        relative = [(sums[at][:, 0] / sums[at][:, 1]).sqrt().tolist() for at in sorted(sums)]
        told[codec]["error"] = {
            which: [round(layer[place], 5) for layer in relative]
            for place, which in enumerate("kv")
        }
    return len(sums), shape


def _squares(difference: Tensor, right: Tensor) -> Tensor:
    return torch.stack([difference.square().sum(), right.square().sum()])


@torch.inference_mode()
def speeds(shape: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """GB/s of stored bytes, bfloat16, in one thread."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(TOKENS, *shape, generator=generator).bfloat16() for _ in range(2))
    encoded, rates, profiles = {}, {}, {}
    for name in codec_names():
        codec = codec_named(name)
        encoded[name] = EncodedLayer(codec, codec.encode(keys, values), keys.dtype)
        rates[name] = {"encode": list[float](), "decode": list[float]()}
        profiles[name] = operations(encoded[name])
    scratch = Scratch()
    out = [torch.empty_like(keys), torch.empty_like(values)]
    for _ in range(ROUNDS):
        for name, layer in encoded.items():
            begin = time.perf_counter()
            layer.codec.encode(keys, values)
            rates[name]["encode"].append(layer.nbytes / (time.perf_counter() - begin) / 1e9)
            begin = time.perf_counter()
            decoded = layer.decode(scratch=scratch)
            if (
                layer.codec.lossless
            ):  # it is handed on as it is; copied, to have something to compare with
                for place, part in zip(out, decoded, strict=True):
                    place.copy_(part)
            rates[name]["decode"].append(layer.nbytes / (time.perf_counter() - begin) / 1e9)
    return {
        name: {
            "stored_bytes": encoded[name].nbytes,
            "encode_gb_per_s": summary(told["encode"]) if name != "plain" else None,
            "decode_gb_per_s": summary(told["decode"]),
            "decode_kv_gb_per_s": round(
                statistics.median(told["decode"]) * encoded["plain"].nbytes / encoded[name].nbytes,
                3,
            ),
            "decode_profile": profiles[name],
        }
        for name, told in rates.items()
    }


def operations(layer: EncodedLayer) -> dict[str, float]:
    """The share of each of torch's operations in decoding."""
    scratch = Scratch()
    layer.decode(scratch=scratch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(20):
            layer.decode(scratch=scratch)
    spent = {one.key: one.self_cpu_time_total for one in profile.key_averages()}
    total = sum(spent.values())
    shares = {key.removeprefix("aten::"): round(us / total, 3) for key, us in spent.items()}
    return dict(sorted(((k, v) for k, v in shares.items() if v >= 0.03), key=lambda item: -item[1]))


def draw(figure: Any, codecs: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    for codec, told in codecs.items():
        if codec == "plain":
            continue
        (line,) = left.plot(told["error"]["k"], label=f"{codec}, K")
        left.plot(told["error"]["v"], linestyle="--", color=line.get_color(), label=f"{codec}, V")
    left.set(xlabel="layer", ylabel="relative error", yscale="log")
    left.legend(fontsize=7)
    for codec, told in codecs.items():
        place = (told["bytes_per_token"]["the model"], 100 * told["agreement"])
        right.scatter(*place)
        right.annotate(codec, place)
    right.set(xlabel="bytes a token", ylabel="equal tokens, % of the answer out of plain chunks")


if __name__ == "__main__":
    main()
