"""`--lora NAME=PATH`: a model with an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv_rag.errors import OptionError

if TYPE_CHECKING:
    from semkv_rag.engine import LoRARequest


@dataclass(frozen=True)
class Lora:
    """An adapter as a command was given it.

    Attributes:
        path: its folder.
    """

    name: str
    path: str

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Engine arguments with which the adapter is served.

        Args:
            given: the user's own, which hold.
        """
        from semkv_rag.engine.adapters import serving_adapter

        return serving_adapter(self.path, given)

    def fingerprint(self, model: str, arguments: dict[str, Any]) -> str:
        """What its chunks are stored under."""
        from semkv_rag.engine.launch import adapter_fingerprint

        return adapter_fingerprint(model, self.path, **arguments)

    @property
    def request(self) -> LoRARequest:
        """As vLLM wants it beside a prompt."""
        from semkv_rag.engine import LoRARequest

        return LoRARequest(self.name, 1, self.path)


def lora_of(text: str | None) -> Lora | None:
    """The adapter that is named by `NAME=PATH`; None where nothing is.

    Raises:
        OptionError: the text has no `=`, or there is no adapter in the folder.
    """
    if text is None:
        return None
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise OptionError(f"--lora {text}: write NAME=PATH")
    from semkv_rag.connector.adapter import adapter_digest

    folder = str(Path(path).expanduser().resolve())
    adapter_digest(folder)
    return Lora(name, folder)
