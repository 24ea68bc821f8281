"""LangChain's standard unit tests. No engine is started."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_semkv import ChatSemKV
from langchain_tests.unit_tests import ChatModelUnitTests
from syrupy.assertion import SnapshotAssertion


class TestChatSemKV(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatSemKV]:
        return ChatSemKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "some/model", "store": "kv-store"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        model = {"base_url": "http://localhost:8000/v1", "model": "some/model"}
        return {"SEMKV_API_KEY": "a key"}, model, {"api_key": "a key"}

    @pytest.mark.xfail(
        strict=True,
        reason="it loads with allowed_objects='all', which is langchain-core's own list of classes; "
        "test_options.py loads with allowed_objects=[ChatSemKV]",
    )
    def test_serdes(self, model: BaseChatModel, snapshot: SnapshotAssertion) -> None:
        super().test_serdes(model, snapshot)
