"""Tool choice for models whose own format of tool calls nobody has named.

A named tool and `required` need no such format: structured output forces a call in plain JSON. vLLM
does both in every tool parser, but wants one to be configured; this one has nothing else in it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser

NAME = "semkv_forced"


class ForcedToolParser(ToolParser):
    """Knows forced calls only."""

    def adjust_request(self, request: Any) -> Any:
        """Raises VLLMValidationError where the model would have to choose."""
        chat = isinstance(request, ChatCompletionRequest)
        if chat and request.tools and request.tool_choice == "auto":
            raise VLLMValidationError(
                "nothing is known of how this model writes tool calls: start the engine with "
                'chat_args={"enable_auto_tool_choice": True, "tool_call_parser": …}, the server '
                "with --enable-auto-tool-choice --tool-call-parser …, or choose a tool: "
                'tool_choice is "required", "none" or a tool\'s name',
                parameter="tool_choice",
            )
        return super().adjust_request(request)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """What the model says by itself is text."""
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *args: Any, **kwargs: Any
    ) -> DeltaMessage | None:
        return DeltaMessage(content=delta_text) if delta_text else None


def configure_tools(args: Namespace) -> bool:
    """Complete the arguments of vLLM's server; whether the model may choose tools by itself."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.enable_auto_tool_choice:
        return True
    if args.tool_call_parser is None:
        ToolParserManager.register_module(NAME, module=ForcedToolParser)
        args.tool_call_parser, args.enable_auto_tool_choice = NAME, True
    return False
