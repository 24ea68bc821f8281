"""LoRA adapters: known by their weights, so that no adapter's KV is ever used by another.

An adapter's name, path and number say nothing: all three may come to stand for other weights while an
engine runs. So chunks are stored under the model's fingerprint together with a digest of the adapter's
files. The scheduler takes the digest of what is on the disk when a request arrives, the workers that of
what they have loaded; where the two differ nothing is reused and nothing is stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from blake3 import blake3
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from semkv_rag.connector.fingerprint import WEIGHTS, files_digest
from semkv_rag.errors import OptionError

CONFIG = "adapter_config.json"
NONE_SERVED = "the engine serves no LoRA adapters: pass enable_lora=True"


@dataclass(frozen=True)
class Adapter:
    """An adapter with the weights that it is to have.

    Attributes:
        digest: of its files; see `adapter_digest`.
        request: as vLLM knows it.
    """

    digest: str
    request: LoRARequest


def adapter_digest(path: str) -> str:
    """The digest of an adapter's weights and configuration, 64 hex digits.

    As with a model's fingerprint, digests of files are kept between runs. Files that are as they were are
    not looked into again: this is asked with every request.

    Raises:
        OptionError: the folder holds no adapter, or is not on this machine.
    """
    try:
        found = {file for pattern in (CONFIG, *WEIGHTS) for file in _folder(path).glob(pattern)}
        stats = [(file.name, file.stat()) for file in sorted(found)]
        seen = tuple((name, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats)
        return _digest(path, seen)
    except OSError as error:
        raise OptionError(f"the LoRA adapter {path} cannot be read: {error}") from error


@lru_cache(maxsize=256)
def _digest(path: str, _seen: tuple[tuple[str, int, int, int], ...]) -> str:
    rank_of(path)
    files = files_digest(_folder(path), (CONFIG, *WEIGHTS))
    if len(files) < 2:
        raise OptionError(f"{path} is no LoRA adapter: it has no weights")
    return blake3(json.dumps(files, sort_keys=True).encode()).hexdigest()


def rank_of(path: str) -> int:
    """An adapter's rank, as its configuration says.

    Raises:
        OptionError: the folder holds no adapter, or is not on this machine.
    """
    if not _folder(path).is_dir():
        raise OptionError(f"{path} is no LoRA adapter: there is no such folder on this machine")
    try:
        config = json.loads((_folder(path) / CONFIG).read_text())
        return int(config["r"])
    except FileNotFoundError:
        raise OptionError(f"{path} is no LoRA adapter: it has no {CONFIG}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is no LoRA adapter: its {CONFIG} says no rank") from error


def adapter_model(base: str, digest: str, config: LoRAConfig | None) -> str:
    """What chunks of a model with an adapter are stored under, 64 hex digits.

    Args:
        base: the model's fingerprint.
        digest: the adapter's.
        config: of the engine; some of it changes what an adapter does.

    Raises:
        OptionError: the engine has none.
    """
    if config is None:
        raise OptionError(NONE_SERVED)
    facts = [base, digest, str(config.lora_dtype), config.target_modules]
    return blake3(json.dumps(facts).encode()).hexdigest()


def _folder(path: str) -> Path:
    """As vLLM takes a path that is on this machine."""
    return Path(path).expanduser() if path.startswith("~") else Path(path)
