"""LoRA adapters by their folders: what vLLM wants beside a prompt, and what it must be started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from semkv_rag.connector.adapter import adapter_digest, rank_of

_DIGITS = 7
"""Hex digits of the digest that become vLLM's number of an adapter, which has 32 bits."""


def adapter_request(folder: str | Path) -> LoRARequest:
    """The adapter in a folder, under a name and number that follow from its weights.

    Raises:
        OptionError: the folder holds no adapter, or is not on this machine.
    """
    path = Path(folder).expanduser().resolve()
    digest = adapter_digest(str(path))
    return LoRARequest(f"{path.name}-{digest[:_DIGITS]}", 1 + int(digest[:_DIGITS], 16), str(path))


def serving_adapter(folder: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments with which the adapter in a folder is served.

    Args:
        given: the user's own, which hold.

    Raises:
        OptionError: as of `adapter_request`.
    """
    rank = rank_of(str(Path(folder).expanduser()))
    # Where vLLM has no such rank, it says so itself.
    most = next((one for one in get_args(MaxLoRARanks) if one >= rank), rank)
    return {"max_lora_rank": most, **given, "enable_lora": True}
