"""LangChain's standard integration tests, on a real engine with a model that was taught their answers.

docs/langchain.md lists the skipped ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_semkv import ChatSemKV
from langchain_tests.integration_tests import ChatModelIntegrationTests


class Standard(ChatModelIntegrationTests):
    """What the model can do, and how it is reached."""

    params: ClassVar[dict[str, Any]] = {}
    other_model: ClassVar[str | None] = None

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _reach(cls, taught: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
        link = tmp_path_factory.mktemp("models") / "the-same-by-another-name"
        link.symlink_to(Path(taught["model"]), target_is_directory=True)
        cls.params, cls.other_model = taught, str(link)

    @property
    def chat_model_class(self) -> type[ChatSemKV]:
        return ChatSemKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.params

    @property
    def model_override_value(self) -> str | None:
        return self.other_model

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Any, list[Any]]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._long_question(stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._long_question(stream)

    def _long_question(self, stream: bool) -> AIMessage:
        """Asked twice, so that the second finds the first's KV."""
        model, question = ChatSemKV(**self.params, max_tokens=4), "Hello there. " * 40
        model.invoke(question)
        if not stream:
            return model.invoke(question)
        whole: AIMessageChunk | None = None
        for chunk in model.stream(question):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert (whole.usage_metadata or {})["input_token_details"]["cache_read"] > 0
        return whole


class TestChatSemKV(Standard):
    """Structured output by `json_schema`, the default."""


class TestFunctionCalling(Standard):
    """Structured output by a forced call."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
