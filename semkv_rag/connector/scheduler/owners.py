"""Whose KV a request reads and writes: the model's, or that of the model with an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.config.lora import LoRAConfig

from semkv_rag.connector.adapter import Adapter, adapter_digest, adapter_model
from semkv_rag.errors import OptionError

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Owner:
    """Whose chunks are a request's.

    Attributes:
        model: what they are stored under.
        adapter: None for the model alone.
        salt: what goes into the hash of the request's first block, and so of all: vLLM's own hashes
            know an adapter by its name and path, whatever weights these stand for.
        obstacle: in words, why none are reused, or None.
    """

    model: str
    adapter: Adapter | None = None
    salt: bytes = b""
    obstacle: str | None = None


class Owners:
    """Finds whose chunks a request may use; one per engine, in the scheduler's thread.

    Args:
        model: the model's fingerprint.
        config: None where adapters are not served.
    """

    def __init__(self, model: str, config: LoRAConfig | None) -> None:
        self._model, self._config = model, config
        self._loaded: dict[int, str] = {}

    def of(self, request: Request) -> Owner:
        """Whose chunks are a request's."""
        lora = request.lora_request
        if lora is None or self._config is None:
            return Owner(self._model)
        # Of what cannot be told apart no block is shared with any other request.
        alone = b"alone:" + request.request_id.encode()
        try:
            digest = adapter_digest(lora.lora_path)
        except OptionError as error:
            return Owner(self._model, salt=alone, obstacle=str(error))
        # With `load_inplace` vLLM loads the files before each of the adapter's forwards.
        if not lora.load_inplace and self._loaded.get(lora.lora_int_id, digest) != digest:
            changed = f"the files of the LoRA adapter {lora.lora_name} changed since it was loaded"
            return Owner(self._model, salt=alone, obstacle=changed)
        model = adapter_model(self._model, digest, self._config)
        return Owner(model, Adapter(digest, lora), b"adapter:" + digest.encode())

    def loaded(self, digests: Mapping[int, str]) -> None:
        """Take what the workers have loaded, by vLLM's number of the adapter."""
        self._loaded.update(digests)
