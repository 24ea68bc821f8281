"""Fingerprints that were worked out before, so that a run with nothing to do need not import vLLM.

Working one out takes vLLM's configuration of the model, and importing vLLM takes ten seconds. What is
kept is known by everything that goes into it: the model's files by name, size and time of change, the
engine's arguments, the packages' versions, and the environment that vLLM reads. Should one ever be wrong,
the engine says so when it starts, and nothing is stored under it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blake3 import blake3

_PACKAGES = ("semkv-rag", "vllm", "torch", "transformers")
_ENVIRONMENT = ("VLLM_", "CUDA_", "HF_")
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Where a GPU's driver is: the default dtype is another one there."""
_MOST = 1000


def cache_folder() -> Path:
    """Where what can be worked out again is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "semkv-rag"


class KnownFingerprint:
    """The fingerprint of a model with some engine arguments, as far as it is remembered.

    Made before vLLM is imported, which changes the environment.

    Args:
        model: a folder; of a hub's model nothing is remembered.
        arguments: as for `Engine`.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        self._key = _key(model, arguments)

    def get(self) -> str | None:
        """The fingerprint, or None."""
        return None if self._key is None else _read().get(self._key)

    def remember(self, fingerprint: str) -> None:
        """Keep what was worked out; where it cannot be kept, the next run is slower."""
        if self._key is None:
            return
        known = _read()
        known.pop(self._key, None)
        known[self._key] = fingerprint
        path = _path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(dict([*known.items()][-_MOST:])))
            temporary.replace(path)
        except OSError:
            pass


def _key(model: str, arguments: Mapping[str, Any]) -> str | None:
    folders = [model, *(str(arguments[name]) for name in ("tokenizer",) if arguments.get(name))]
    try:
        files = {name: _files(Path(name)) for name in folders}
    except OSError:
        return None
    facts = {
        "files": files,
        "arguments": dict(arguments),
        "packages": [_version(name) for name in _PACKAGES],
        "environment": sorted(
            item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)
        ),
        "devices": [Path(name).exists() for name in _DEVICES],
    }
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of all files; raises OSError where there is no such folder."""
    found = []
    for file in sorted(folder.resolve(strict=True).iterdir()):
        stat = file.stat()
        found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _path() -> Path:
    return cache_folder() / "fingerprints.json"


def _read() -> dict[str, str]:
    try:
        known = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
