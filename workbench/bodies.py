"""Bodies of HTTP requests that are drawn: of every route a tenant may POST to, sound ones and broken.

A seed is a body: what a run finds can be sent again alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from workbench.server import Server

JSON = "application/json"
OWN = "/semkv/v1/"
VOCABULARY = 678
"""Token ids of the reader."""

BUDGET_SECONDS = 20.0
"""For any one answer, while others are under way."""

GIVE_UP_SECONDS = 60.0


@dataclass(frozen=True)
class Raw:
    """A piece of JSON as it is written, for what `json` does not write."""

    text: str


@dataclass(frozen=True)
class Fields:
    """A JSON object whose names may stand there twice."""

    entries: tuple[tuple[str, Any], ...]


TEXT = "Question : who leads Tre klim ? Answer :"

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, -0.0, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, Raw("1e999"),
    Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("1e-999"), Raw("9" * 400), "", " ", "\0", "a\0b",
    "\ud800",
    "\udfff\ud800", "\x07\x1b[0m", "\u2028", "\ufeff", "😀", "../../etc/passwd", "1", "null", "x" * 5000,
    [], {}, [[]],
    [{}], [None], [1, "a", None], {"": ""}, {"a": {"b": [1, {"c": None}]}}, Raw("[" * 50 + "]" * 50),
    Raw("[" * 5000 + "]" * 5000), Raw('{"a":' * 2000 + "1" + "}" * 2000), [0] * 2000, ["a"] * 300,
]  # fmt: skip

WISHES: list[Any] = [
    {}, {"enabled": False}, {"ratio": 0.3}, {"ratio": -1}, {"ratio": Raw("NaN")}, {"ratio": True},
    {"ratio": "0.5"}, {"ratio": Raw("1e999")}, {"ratio": 10**400}, {"selector": "none"}, {"selector": []},
    {"selector": "\ud800"}, {"preset": "exact"}, {"preset": {}}, {"preset": None}, {"check_layer": 1},
    {"check_layer": 10**30}, {"check_layer": -1}, {"check_layer": True}, {"question_tokens": 5},
    {"question_tokens": 2**63}, {"question_tokens": [1]}, {"namespace": "default"},
    {"namespace": "tenant"},
    {"namespace": "another"}, {"namespace": ["tenant"]}, {"namespace": None}, {"namespace": "\ud800"},
    {"namespace": {}}, {"capture": {}}, {"capture": {"id": "a" * 64, "begin": 0}}, {"capture": None},
    {"near_images": True}, {"near_images": {"a": "b"}}, {"store_images": True}, {"store_images": ["a"]},
    {"answer_tokens": 1}, {"answer_tokens": [1, 2]}, {"answer_tokens": -1}, {"enabled": None}, {"": 1},
    {"\ud800": 1}, {"enabled": "false"},
]  # fmt: skip

_TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

_IDS: list[Any] = [
    [], [[]], [-1], [VOCABULARY], [VOCABULARY - 1], [10**9], [2**31], [2**63], [10**30], [1.5], [5, "a"],
    [0],
    [5] * 1023, [5] * 1024, [5] * 1500, [[5], []], [[5], [-1]], [[5, 6]] * 5, [None], [True],
]  # fmt: skip
_TEXTS: list[Any] = [
    "",
    " ",
    "a " * 3000,
    "\ud800 a",
    "\0",
    "<eos>",
    "<pad> <unk>",
    ["a", ""],
    [""],
    [TEXT] * 5,
]
_SCHEMAS: list[Any] = [
    {"type": "object"}, {"type": "integer"}, {"$ref": "#"}, {"type": 5}, {"type": "nothing"}, [], "",
    "{", "true", 5,
    {"properties": {"a": {"$ref": "#/nowhere"}}}, {"enum": []}, {"pattern": "(", "type": "string"},
    {"minItems": -1},
    {"type": "integer", "minimum": 10**30}, {"enum": ["\ud800"]}, {"const": Raw("1e999")},
]  # fmt: skip
_STRUCTURED: list[Any] = [
    *({"json": schema} for schema in _SCHEMAS), {"regex": "a+"}, {"regex": "("}, {"regex": ""},
    {"regex": "\ud800"},
    {"regex": "(?=a)b"}, {"regex": "\\p{L}"}, {"regex": "a{5,2}"}, {"regex": "[z-a]"}, {"regex": "\\1"},
    {"regex": "\0"}, {"choice": []}, {"choice": [""]}, {"choice": ["Tre", "klim"]},
    {"choice": ["\ud800"]},
    {"choice": ["\0", '"']}, {"grammar": 'root ::= "a"'}, {"grammar": ""}, {"grammar": "root ::="},
    {"grammar": "root ::= root"},
    {"grammar": 'a ::= "b"'}, {"grammar": "start: X"}, {"json_object": True}, {"json_object": False}, {},
    {"structural_tag": ""}, {"structural_tag": "{}"}, {"structural_tag": '{"type": "structural_tag"}'},
    {"structural_tag": json.dumps({"structures": [], "triggers": []})}, {"regex": "a", "json": {}},
    {"json_object": True, "whitespace_pattern": "("}, {"choice": ["a"], "_backend": "none"},
]  # fmt: skip
_FORMATS: list[Any] = [
    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "nothing"},
    {"type": None},
    {"type": "structural_tag"}, {"type": "structural_tag", "format": {}},
    {"type": "structural_tag", "format": {"type": "any_text"}},
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}} for schema in _SCHEMAS),
]  # fmt: skip

_LENGTHS: list[Any] = [
    0,
    1,
    -1,
    3,
    1.5,
    "2",
    True,
    [],
    {},
    10**30,
    Raw("1e999"),
    Raw("NaN"),
    "\ud800",
]
LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""Fields that stay, with a small number or a wrong one: else an answer takes as long as the model can."""

FIELDS: dict[str, list[Any]] = {
    "kv_transfer_params": [{"semkv": wishes} for wishes in WISHES]
    + [{"captured": True}, {"do_remote_prefill": True, "remote_block_ids": [1]}, {"semkv": {}, "x": 1}],
    "ec_transfer_params": [{"a": 1}, {}],
    "vllm_xargs": [{"kv_transfer_params": "a"}, {"kv_transfer_params": ["a"]}, {"a": 1},
    {"a": Raw("1e999")},
                   {"kv_transfer_params": {"semkv": {"namespace": "default"}}}, {"a": 10**30},
                   {"a": "\ud800"}],
    "cache_salt": ["a", "", "x" * 1025, "\ud800", "\0"],
    "request_id": ["", "x" * 10_000, "semkv-capture-1", "\ud800", "a/b\n", "same"],
    "session_id": ["", "\ud800", "x" * 5000],
    "priority": [-(2**63), 2**63 - 1, 5, -5],
    "n": [0, -1, 2, 5, 257, 10**6, 2**63],
    "best_of": [0, -1, 2, 10**6],
    "use_beam_search": [True],
    "length_penalty": [0, -1.0, Raw("1e999")],
    "early_stopping": [True],
    "logit_bias": [{"5": 100}, {"-1": 1}, {str(VOCABULARY): 1}, {"9" * 20: 1}, {"5": Raw("1e999")},
    {"a": 1},
                   {"5": Raw("NaN")}, {"5": -100}, {str(i): -100 for i in range(VOCABULARY)}],
    "stop": ["", [""], ["a"] * 100, "\0", "\ud800", [1], "klim"],
    "stop_sequences": ["", [""], ["a"] * 100, ["\ud800"]],
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "logprob_token_ids": _IDS,
    "label_token_ids": _IDS,
    "bad_words": [[""], [" "], ["a", "klim"], ["\ud800"], ["x" * 1000], ["a"] * 500],
    "logprobs": [0, 1, 5, 20, 21, -1, -2, True, VOCABULARY, 10**9],
    "top_logprobs": [0, 5, -1, 21, 10**9],
    "prompt_logprobs": [0, 1, -1, -2, 21, 10**9],
    "echo": [True],
    "suffix": ["a", "\ud800"],
    "min_tokens": [1, -1, 5, 10**9],
    "max_tokens": _LENGTHS,
    "max_completion_tokens": _LENGTHS,
    "max_output_tokens": _LENGTHS,
    "temperature": [0, 1e-9, 1, 2, 100, -1, Raw("1e999"), Raw("NaN"), Raw("1e308"), Raw("1e-320")],
    "top_p": [0, 0.5, 1, 1.5, -1, Raw("NaN"), Raw("1e-320")],
    "top_k": [-1, 0, 1, -2, 10**9, 2**31, 2**63, VOCABULARY],
    "min_p": [0.5, 1.5, Raw("NaN")],
    "repetition_penalty": [0, 1.5, -1, Raw("1e999"), Raw("1e-320"), Raw("NaN"), 2],
    "presence_penalty": [2, -3, Raw("1e999"), Raw("NaN")],
    "frequency_penalty": [2, -3, Raw("1e999"), Raw("NaN")],
    "seed": [0, -1, 2**63 - 1, -(2**63), 2**64],
    "truncate_prompt_tokens": [0, 1, -1, -2, 5, 10**9, 2**63 - 1],
    "truncation_side": ["left", "right", "up"],
    "truncation": ["auto", "up"],
    "prompt_embeds": ["AAAA", "", "\ud800", ["AAAA"], "not base64"],
    "stream": [True],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}],
    "stream_interval": [1, 0, 10**9, 2**64],
    "structured_outputs": _STRUCTURED,
    "response_format": _FORMATS,
    "text": [{"format": a} for a in _FORMATS],
    "output_config": [{"format": {"type": "json_schema",
    "schema": a}} for a in _SCHEMAS] + [{"effort": "low"}],
    "repetition_detection": [{}, {"max_pattern_size": 3, "min_count": 2}, {"max_pattern_size": -1},
                             {"max_pattern_size": 10**30, "min_count": 2, "min_pattern_size": 1},
                             {"max_pattern_size": 3, "min_count": 0}],
    "thinking_token_budget": [0, -1, -2, 5, 10**30],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"},
    {}],
    "watermarking": [True],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "return_token_offsets": [True],
    "return_token_strs": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "ignore_eos": [True],
    "add_special_tokens": [True, False],
    "routed_experts_prompt_start": [1, 10**9],
    "chat_template": ["{{ 1 }}", "{{ x.y.z }}", "{% for", "{{ messages }}", "{{ raise_exception('a') }}",
    ""],
    "chat_template_kwargs": [{"enable_thinking": True}, {"messages": []}, {"tokenize": True},
    {"chat_template": "x"},
                             {"conversation": 1}, {"tools": 5}, {"return_dict": True}, {"\ud800": 1},
                             {"continue_final_message": True}, {"add_generation_prompt": 1}],
    "mm_processor_kwargs": [{"a": 1}],
    "media_io_kwargs": [{"image": {"a": 1}}, {"nothing": {}}],
    "documents": [[{"a": "b"}], [{}]],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "tools": [[], [_TOOL], [_TOOL] * 3, [{"type": "function"}], [{"name": "look", "input_schema": {}}],
              [{"type": "function", "name": "look", "parameters": {"type": 5}}], [{"type": "web_search"}],
              [{"type": "function", "function": {"name": "\ud800", "parameters": {"$ref": "#"}}}],
              [{"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:1"}],
              [{"type": "code_interpreter"}]],
    "tool_choice": ["auto", "none", "required", "look", {"type": "function",
    "function": {"name": "look"}},
                    {"type": "function", "function": {"name": "other"}}, {"type": "any"},
                    {"type": "tool", "name": "a"}],
    "parallel_tool_calls": [False],
    "reasoning_effort": ["low", "none", "nothing"],
    "reasoning": [{"effort": "low"}, {"summary": "auto"}, {}],
    "include_reasoning": [False],
    "previous_response_id": ["resp_1", "", "\ud800"],
    "background": [True],
    "store": [True, False],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["a"]],
    "enable_response_messages": [True],
    "previous_input_messages": [[{}], [{"role": "user"}], []],
    "instructions": ["a", "\ud800"],
    "max_tool_calls": [0, -1],
    "metadata": [{}, {"a": "b"}, {"\ud800": "a"}],
    "user": ["a", "\ud800"],
    "system": ["a", [{"type": "text", "text": "a"}], [{"type": "image"}], "\ud800"],
    "prompt_cache_key": ["", "a"],
    "service_tier": ["auto", "nothing"],
    "images": [["http://127.0.0.1:1/a.png"], ["data:image/png;base64,AAAA"], ["file:///etc/passwd"],
    [""]],
    "audio": [["data:audio/wav;base64,AAAA"]],
    "videos": [["data:video/mp4;base64,AAAA"]],
    "apply_softmax": [False],
    "item_first": [True],
    "prompt": [*_IDS, *_TEXTS],
    "input": [*_TEXTS, [{"role": "user", "content": "a"}], [{"type": "function_call_output",
    "call_id": "a", "output": "b"}],
              [{"type": "function_call", "name": "a", "arguments": "{", "call_id": "b"}],
              [{"type": "item_reference", "id": "a"}],
              [{"type": "reasoning", "summary": []}], [{"role": "developer", "content": []}]],
    "messages": [
        [], [[]], [{"role": "user"}], [{"role": "assistant", "content": None}], [{"role": "tool",
        "content": "a"}],
        [{"role": "a", "content": "b"}], [{"role": "user", "content": "\ud800"}], [{"role": "user",
        "content": "a " * 3000}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "user",
        "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA",
        "format": "wav"}}]}],
        [{"role": "user", "content": [{"type": "nothing"}]}], [{"role": "user", "content": []}],
        [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "a",
        "arguments": "{"}}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{}]}], [{"role": "user",
        "content": [{"type": "refusal"}]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
        "content": [{"type": "a"}]}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}],
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
    ],
    "query": [*_IDS, *_TEXTS],
    "items": [*_IDS, *_TEXTS, [[5], [6]]],
    "tokens": _IDS,
    "state": [{"a": 1}, [], "\ud800", "a " * 3000],
    "questions": [{}, {"a": {"type": "nothing"}}, {"": {"type": "yes_no"}}, {"a": {"type": "choice",
    "criteria": {"x": 5}}},
                  {"a": {"type": "choice", "criteria": []}}, {"a": {"type": "choice", "criteria": ["b",
                  "c"]}},
                  {"a": {"type": "score", "criteria": {"min": 0, "max": 10**9}}},
                  {"\ud800": {"type": "bool"}}],
    "namespace": ["tenant", "default", "another", "", "a/b", "..", "\ud800", ["tenant"]],
    "prefix": ["", "a prompt prefix", "\ud800", "\0", "a " * 2000],
    "context": [[], ["prefix"], ["prefix", "left"], ["left", "left"], ["nothing"], "prefix", [None],
    [["prefix"]]],
    "source_version": [None, 5, "", [], {}, True, "\ud800", 10**30],
    "sources": [[], ["a.md"], [""], ["\ud800"], ["a\0"], ["x" * 10_000], [None], "a.md", ["a.md"] * 300],
    "correct": [True, 1, None, "true"],
    "similarity": [Raw("NaN"), Raw("1e999"), 2, True, "1", None, -1, 10**400],
    "chunks": [[], [""], ["\ud800"], ["\0"], ["a " * 3000], [None], ["a"] * 40, "a", [["a"]]],
    "name": ["", "\ud800", "\0", "../a", "x" * 10_000, None],
}  # fmt: skip
"""Values that mean something, or nearly, for the fields of this name."""

TYPES = [
    None, "", JSON, "application/json; charset=utf-16", "application/json; charset=nothing",
    "APPLICATION/JSON",
    "text/plain", "multipart/form-data; boundary=a", "multipart/form-data",
    "application/x-www-form-urlencoded",
    "application/octet-stream", "application/vnd.api+json", "x" * 2000,
]  # fmt: skip


def sound_bodies(model: str) -> dict[str, list[dict[str, Any]]]:
    """Bodies that are answered, by the paths that a tenant may POST to on a model that generates."""
    asked: dict[str, Any] = {"model": model, "max_tokens": 2, "temperature": 0}
    said = [{"role": "user", "content": TEXT}]
    wishes = {"kv_transfer_params": {"semkv": {"ratio": 0.2, "selector": "kv_deviation"}}}
    chat = {**asked, "messages": said}
    labels = {"query": TEXT, "items": ["Tre", "klim"], "label_token_ids": [5, 6]}
    explored = {
        "namespace": "tenant",
        "donor": "a" * 64,
        "layer": "b",
        "encoder": "c",
        "similarity": 0.9,
    }
    return {
        "/v1/completions": [
            {**asked, "prompt": TEXT},
            {**asked, "prompt": [5, 6, 7, 8], **wishes, "logprobs": 1},
            {**asked, "prompt": [TEXT, "Tre klim"], "stream": True, "n": 2, "temperature": 1},
            {**asked, "prompt": TEXT, "use_beam_search": True, "n": 2},
        ],
        "/v1/chat/completions": [
            chat,
            {**chat, **wishes, "stream": True, "stream_options": {"include_usage": True}},
            {**chat, "tools": [_TOOL], "tool_choice": "none", "logprobs": True, "top_logprobs": 2},
            {**chat, "use_beam_search": True, "n": 2},
        ],
        "/v1/chat/completions/batch": [{**asked, "messages": [said, said]}],
        "/v1/responses": [
            {"model": model, "input": TEXT, "max_output_tokens": 2},
            {"model": model, "input": said, "max_output_tokens": 2, "stream": True, **wishes},
        ],
        "/v1/messages": [{**chat, "system": "a"}, {**chat, "stream": True, **wishes}],
        "/v1/messages/count_tokens": [{"model": model, "messages": said}],
        "/tokenize": [{"model": model, "prompt": TEXT}, {"model": model, "messages": said}],
        "/detokenize": [{"model": model, "tokens": [5, 6]}],
        "/generative_scoring": [{"model": model, **labels}, labels],
        "/v1/systemone": [
            {"model": model, "state": TEXT, "questions": {"a": {"type": "noted", "criteria": "b"}}}
        ],
        OWN + "precompute": [
            {"documents": [{"name": "a.md", "chunks": [TEXT, "Tre klim of Ver lok ."]}]},
            {"documents": [], "prefix": "a", "context": ["prefix"], "namespace": "tenant"},
        ],
        OWN + "forget": [{"sources": ["a.md"]}, {"sources": [], "namespace": "tenant"}],
        OWN + "outcome": [{"explored": explored, "correct": True}],
    }  # fmt: skip


@dataclass(frozen=True)
class Body:
    """A request's path, headers and body; `seed` is what it was drawn from."""

    seed: int
    path: str
    headers: dict[str, str]
    content: bytes


def body(seed: int, model: str) -> Body:
    """The body of a seed; one of eight is sound."""
    rng = random.Random(seed)
    path, sound = rng.choice(sorted(sound_bodies(model).items()))
    value: Any = rng.choice(sound)
    headers = {"content-type": JSON}
    if rng.random() < 1 / 8:
        return Body(seed, path, headers, _written(value).encode())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng)
    content = _written(value).encode()
    if rng.random() < 0.1:
        content = _broken(content, rng)
    if rng.random() < 0.05:
        kind = rng.choice(TYPES)
        headers = {} if kind is None else {"content-type": kind}
    if rng.random() < 0.02:
        headers["content-encoding"] = rng.choice(("gzip", "nothing"))
    if rng.random() < 0.02:
        headers["x-semkv-namespace"] = rng.choice(("tenant", "default", "a/b", ""))
    return Body(seed, path, headers, content)


def _changed(value: Any, rng: random.Random) -> Any:
    """`value` with one thing in it changed, most often at its top."""
    if isinstance(value, dict):
        value = Fields(tuple(value.items()))
    if isinstance(value, Fields) and value.entries:
        at = rng.randrange(len(value.entries))
        name, old = value.entries[at]
        before, behind = value.entries[:at], value.entries[at + 1 :]
        if name in LENGTHS:
            return Fields((*before, (name, rng.choice(_LENGTHS)), *behind))
        match rng.choice("aaaaaaaooddtwukii"):
            case "a":  # a field that some route knows
                name = rng.choice(sorted(FIELDS))
                kept = tuple(entry for entry in value.entries if entry[0] != name)
                return Fields((*kept, (name, rng.choice(FIELDS[name]))))
            case "o":
                return Fields((*before, (name, rng.choice([*ODD, *FIELDS.get(name, ())])), *behind))
            case "d":
                return Fields((*before, *behind))
            case "t":
                return Fields((*value.entries, (name, rng.choice(ODD))))
            case "w":
                return Fields((*before, (name, rng.choice(([old], {"a": old}))), *behind))
            case "u":
                return Fields(
                    (
                        *value.entries,
                        (rng.choice(("surprise", "", "\ud800", "\0")), rng.choice(ODD)),
                    )
                )
            case "k":
                return Fields((*before, (name + rng.choice((" ", "\0", "s", "_")), old), *behind))
            case _:
                return Fields((*before, (name, _changed(old, rng)), *behind))
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        new = rng.choice(
            ([], [_changed(value[at], rng)], [_changed(value[at], rng)], [value[at]] * 3)
        )
        return [*value[:at], *new, *value[at + 1 :]]
    return rng.choice(ODD)


def _written(value: Any) -> str:
    match value:
        case Raw(text):
            return text
        case Fields(entries):
            return (
                "{" + ",".join(f"{json.dumps(name)}:{_written(one)}" for name, one in entries) + "}"
            )
        case dict():
            return _written(Fields(tuple(value.items())))
        case list():
            return "[" + ",".join(map(_written, value)) + "]"
        case _:
            return json.dumps(value)


def _broken(content: bytes, rng: random.Random) -> bytes:
    """No JSON any more, most often."""
    at = rng.randrange(len(content))
    match rng.randrange(8):
        case 0:
            return content[:at]
        case 1:
            return (
                content[:at]
                + rng.choice((b"\xff", b"\xed\xa0\x80", b"\0", b"\x80\x80"))
                + content[at:]
            )
        case 2:
            return b"\xef\xbb\xbf" + content
        case 3:
            return content.decode().encode(rng.choice(("utf-16", "utf-32-le")))
        case 4:
            return content + rng.choice((b"}", b"\0", b"{}", content))
        case 5:
            return b""
        case 6:
            return rng.choice(
                (b"null", b"[]", b'"a"', b"5", b"{", b"NaN", b"\x1f\x8b\x08\0", b"a=b&c=d")
            )
        case _:
            changed = bytearray(content)
            changed[at] = rng.randrange(256)
            return bytes(changed)


KNOWN = (
    # vLLM ends a request by an error of its own where the model has no token that the grammar allows.
    # The reader's vocabulary is of words, which JSON cannot be written with.
    (
        re.compile(rb"tool_choice|structured_outputs|format|output_config"),
        "Internal server error",
    ),
    # vLLM's beam search over a prompt without tokens, or for an answer without any.
    (re.compile(rb'"use_beam_search"'), "list index out of range"),
    # vLLM's Messages API does not know the error event of the chat's stream that it is made of.
    (re.compile(rb'"stream"'), "Field required [type=missing"),
)
"""What in a body has vLLM itself answer 500, with which message; each with its reason."""


@dataclass(frozen=True)
class Fault:
    """What should not be: the seed of a body, where it went, and what is wrong with its answer."""

    seed: int
    path: str
    wrong: str


@dataclass
class Outcome:
    """What became of bodies.

    Attributes:
        statuses: answers by path and status. A stream that ends in an error counts as the error's code.
        known: answers that are in `KNOWN`.
        slowest_s: seconds of the slowest answer, and `slowest` its seed.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    known: int = 0
    faults: list[Fault] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: int = -1


def engine_processes(server: Server) -> set[str]:
    """The ids of the engine's processes that the server's log tells of."""
    return set(re.findall(r"\(EngineCore\S* pid=(\d+)\)", server.log()))


def plain_answer(server: Server) -> str:
    """What the model says to another tenant who asks a plain question.

    Raises:
        httpx.HTTPStatusError: it is not answered.
    """
    answer = httpx.post(
        server.base_url + "/completions",
        json={"model": server.model, "prompt": TEXT, "max_tokens": 4, "temperature": 0},
        headers={"Authorization": f"Bearer {server.api_key}"},
        timeout=GIVE_UP_SECONDS,
    )
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def send(server: Server, seeds: Iterable[int], *, at_once: int = 8) -> Outcome:
    """Send the bodies of these seeds with the tenant's key."""
    outcome = Outcome()
    waiting = iter(seeds)
    headers = {"Authorization": f"Bearer {server.tenant_key}"}
    base_url = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=GIVE_UP_SECONDS
    ) as client:

        async def worker() -> None:
            for seed in waiting:
                await _send(client, body(seed, server.model), outcome)

        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(worker())
    return outcome


async def _send(client: httpx.AsyncClient, one: Body, outcome: Outcome) -> None:
    began = time.monotonic()
    try:
        answer = await client.post(one.path, content=one.content, headers=one.headers)
    except httpx.TransportError as error:  # a timeout is one
        outcome.faults.append(Fault(one.seed, one.path, f"no answer: {error!r}"))
        return
    took = time.monotonic() - began
    if took > outcome.slowest_s:
        outcome.slowest_s, outcome.slowest = took, one.seed
    status, wrong = judged(answer)
    outcome.statuses[one.path, status] += 1
    if took > BUDGET_SECONDS:
        wrong = f"took {took:.0f} s"
    elif wrong and any(has.search(one.content) and says in wrong for has, says in KNOWN):
        outcome.known += 1
        wrong = ""
    if wrong:
        outcome.faults.append(Fault(one.seed, one.path, wrong))


def judged(answer: httpx.Response) -> tuple[int, str]:
    """The status of an answer, or of the error that its stream ends in; and what is wrong, or nothing."""
    status, text = answer.status_code, answer.text
    refused = status >= 400
    streams = answer.headers.get("content-type", "").startswith("text/event-stream")
    lines = text.splitlines() if streams else [text]
    told = [
        line.removeprefix("data: ") for line in lines if not streams or line.startswith("data: ")
    ]
    for one in told:
        if one == "[DONE]":
            continue
        try:
            value = json.loads(one, parse_constant=_no_number)
        except ValueError as error:
            return status, f"{status}, no JSON ({error}): {one[:200]!r}"
        error = value.get("error") if isinstance(value, dict) else None
        if refused and not isinstance(error, dict) and "detail" not in one:
            return status, f"{status}, no error in it: {one[:200]!r}"
        if status < 400 and isinstance(error, dict):
            status = _status_of(error)
    return status, f"{status}: {text[-400:]!r}" if status >= 500 and status != 501 else ""


def _status_of(error: dict[str, Any]) -> int:
    """Of an error in a stream: vLLM's have a code, our own the name of what was raised."""
    ours = ("OptionError", "LimitError", "CorpusError")
    code = error.get("code", 400 if error.get("type") in ours else 500)
    return code if isinstance(code, int) else 500


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
