"""The model fingerprint: everything that changes the KV of a given chunk.

KV computed by one model must never be used by another, so each chunk is stored under the fingerprint
of what computed it: the weights' bytes, the tokenizer's, the configuration with all overrides
(rope settings among it), dtype, KV dtype, quantisation, and how heads and layers are spread over ranks;
of a model that takes images also what is done to them before and in the vision tower, which vLLM's hash
of an image does not tell. The name or path of a model is no part of it: a copy is the same model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices

from semkv_rag.errors import EngineError
from semkv_rag.known_fingerprints import cache_folder

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "special_tokens_map.json")
PROCESSOR = ("*processor_config.json", "*.py")
VOLATILE = {"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"}


MULTIMODAL = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""The fields of vLLM's `MultiModalConfig` that change an image's or a video's features."""


def config_fingerprint(config: VllmConfig) -> str:
    """The fingerprint of a resolved vLLM configuration, 64 hex digits.

    The first time it reads all weights (about a second for each gigabyte); the digests are cached
    by path, size and time of change.

    Raises:
        EngineError: the model's files are not on this machine.
    """
    model = config.model_config
    facts: dict[str, Any] = {
        "config": _stable(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "load_format": str(config.load_config.load_format),
        "files": files_digest(_folder(model.model, model.revision), WEIGHTS),
        "tokenizer": files_digest(_folder(model.tokenizer, model.tokenizer_revision), TOKENIZER),
    }
    if stages := _stages(config):
        facts["pipeline_parallel"] = stages
    if facts["load_format"] == "dummy":
        facts["seed"] = model.seed
    if model.multimodal_config is not None:
        facts["multimodal"] = {
            **{name: getattr(model.multimodal_config, name, None) for name in MULTIMODAL},
            "files": files_digest(_folder(model.model, model.revision), PROCESSOR),
        }
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _stages(config: VllmConfig) -> list[int]:
    """Where each stage of a pipeline has its first layer, behind the first stage's."""
    layers = config.model_config.get_total_num_hidden_layers()
    stages = config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(layers, stage, stages)[0] for stage in range(1, stages)]


def _stable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _stable(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in VOLATILE
    }


def _folder(model: str, revision: str | None) -> Path:
    """Where a model's files are: a folder, or the hub's cache."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():  # a single GGUF file
        return path.parent
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError) as error:
        raise EngineError(f"the files of {model} are not on this machine: {error}") from error


def files_digest(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """The digest of each file of a model's folder that matches, by name."""
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    cache = _DigestCache()
    digests = {file.name: cache.digest(file) for file in files if file.is_file()}
    cache.save()
    return digests


class _DigestCache:
    """Digests of large files, kept between runs; a file that cannot be kept is only slower."""

    def __init__(self) -> None:
        self._path = cache_folder() / "digests.json"
        self._changed = False
        try:
            self._digests: dict[str, str] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._digests = {}

    def digest(self, file: Path) -> str:
        stat = file.stat()
        # A copy may bring its time of modification along; this machine's time of change it has not.
        key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        if key not in self._digests:
            hasher = blake3(max_threads=blake3.AUTO)
            hasher.update_mmap(file)
            self._digests[key] = hasher.hexdigest()
            self._changed = True
        return self._digests[key]

    def save(self) -> None:
        if not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._digests))
            temporary.replace(self._path)
        except OSError:
            pass
