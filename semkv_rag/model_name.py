"""Whether a model is there, found out before vLLM is imported and anything is made or loaded."""

from __future__ import annotations

import os
from pathlib import Path

from semkv_rag.errors import OptionError

_OF_A_MODEL = ("config.json", "params.json", "*.safetensors", "*.gguf")
"""One of them is in every folder of a model. Whether vLLM can do with it, vLLM tells."""
ASKING_S = 10.0
"""How long the hub may take to answer."""


def check_model(model: str, download_dir: str | None = None) -> None:
    """Make sure that a model's folder or file is there, or that a hub may have it.

    Args:
        model: as for vLLM: a folder, a GGUF file, an address with a scheme, or a hub's name.
        download_dir: where vLLM keeps what it takes from the hub; the hub's own cache unless given.

    Raises:
        OptionError: it cannot be loaded.
    """
    path = Path(model)
    if not model:
        raise OptionError("no model is given: give a folder or a hub's name")
    if path.is_dir():
        if not any(any(path.glob(name)) for name in _OF_A_MODEL):
            raise OptionError(f"the folder {model} holds no model: config.json is missing")
    elif path.is_file() or "://" in model:
        return
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model:
        raise OptionError(f"there is no model at {model!r}: give a folder or a hub's name")
    elif os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("1", "true"):
        _check_hub(
            model.partition(":")[0], download_dir
        )  # behind the colon is which of its GGUF files


def _check_hub(name: str, cache: str | None) -> None:
    from huggingface_hub import HfApi, constants, scan_cache_dir
    from huggingface_hub.errors import (
        CacheNotFound,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    nowhere = f"{name!r} is no folder here"
    try:
        validate_repo_id(name)
        if any(repo.repo_id == name for repo in scan_cache_dir(cache).repos):
            return
    except HFValidationError as error:
        raise OptionError(f"{nowhere}, and no name that a hub could know") from error
    except CacheNotFound:
        pass
    if constants.HF_HUB_OFFLINE:
        raise OptionError(f"{nowhere}, and not in the hub's cache (HF_HUB_OFFLINE is set)")
    try:
        HfApi().model_info(name, timeout=ASKING_S)
    except GatedRepoError as error:
        raise OptionError(f"the hub gives {name} only to who has asked: `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise OptionError(f"{nowhere}, and the hub has no such model") from error
    except Exception as error:  # of whichever HTTP client the hub's library uses
        raise OptionError(f"{nowhere}, and the hub cannot be asked: {error}") from error
