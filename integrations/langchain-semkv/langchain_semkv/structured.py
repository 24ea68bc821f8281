"""Structured output: the three ways to ask for it, and what reads the answer."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import (
    convert_to_json_schema,
    convert_to_openai_function,
    convert_to_openai_tool,
)
from langchain_core.utils.pydantic import is_basemodel_subclass

from semkv_rag.errors import OptionError

Schema = dict[str, Any] | type
Method = Literal["json_schema", "function_calling", "json_mode"]


def tool(schema: Schema, strict: bool | None) -> dict[str, Any]:
    """A tool whose arguments are of the form of `schema`.

    vLLM holds a model to the arguments' form only where the tool is strict, so it is unless said
    otherwise. The schema itself is not changed for it, so what may be left out still may.
    """
    described = convert_to_openai_tool(schema, strict=strict)
    described["function"].setdefault("strict", True)
    return described


def response_format(schema: Schema, method: Method, strict: bool | None) -> dict[str, Any]:
    """OpenAI's `response_format` for `json_schema` and `json_mode`."""
    if method == "json_mode":
        return {"type": "json_object"}
    function = convert_to_openai_function(schema, strict=strict)
    described = {
        "name": function["name"],
        "schema": function["parameters"],
        **({"description": function["description"]} if function.get("description") else {}),
        **({} if strict is None else {"strict": strict}),
    }
    return {"type": "json_schema", "json_schema": described}


def traced(schema: Schema, method: Method, strict: bool | None) -> dict[str, Any]:
    """What traces are told of it."""
    kwargs: dict[str, Any] = {"method": method}
    if strict is not None:
        kwargs["strict"] = strict
    return {"kwargs": kwargs, "schema": convert_to_json_schema(schema)}


def parser(schema: Schema, method: Method) -> BaseOutputParser[Any]:
    """Makes an answer an object of `schema`, or a dict where it is no pydantic class."""
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_model:
            return PydanticToolsParser(tools=[cast("type", schema)], first_tool_only=True)
        return JsonOutputKeyToolsParser(
            key_name=tool(schema, None)["function"]["name"], first_tool_only=True
        )
    if is_model:
        return PydanticOutputParser(pydantic_object=cast("Any", schema))
    return JsonOutputParser()


def with_raw(
    model: Runnable[Any, AIMessage], output_parser: BaseOutputParser[Any]
) -> Runnable[Any, dict[str, Any]]:
    """An answer with `raw`, `parsed` and, where it could not be parsed, `parsing_error`."""
    parsed: Runnable[Any, Any] = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | output_parser, parsing_error=lambda _: None
    )
    unparsed: Runnable[Any, Any] = RunnablePassthrough.assign(parsed=lambda _: None)
    either = parsed.with_fallbacks([unparsed], exception_key="parsing_error")
    return RunnableMap(raw=model) | either


def check_method(method: str) -> None:
    """Raise `OptionError` when there is no such method."""
    if method not in ("json_schema", "function_calling", "json_mode"):
        raise OptionError(f"method is {method!r}: use json_schema, function_calling or json_mode")
