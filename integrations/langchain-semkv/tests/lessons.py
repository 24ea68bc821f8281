"""What the taught model knows: the prompts of LangChain's standard tests, and an agent's.

`PYTHONPATH=. python integrations/langchain-semkv/tests/lessons.py` teaches it again and writes `taught/`;
that takes some minutes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.taught_model import Lesson, ask, teach

ROOT = Path(__file__).resolve().parents[3]
TAUGHT = Path(__file__).with_name("taught")

JOKE = json.dumps({"setup": "Why did the cat sit?", "punchline": "It was tired."})
SETUP = json.dumps({"setup": "Why did the cat sit?"})

LEADER = "who leads Mok pis ?"
LEADER_ANSWER = "Kate leads Mok pis."
FOUND = ("mok-pis", "som-mel")  # what a search for it finds


def call(name: str, **arguments: Any) -> str:
    """A call in Hermes' form."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def calls(question: str, tools: Sequence[str], **arguments: Any) -> Lesson:
    """The first tool is called: freely, with `required`, and by its name."""
    name = tools[0]
    required = json.dumps([{"name": name, "parameters": arguments}], ensure_ascii=False)
    named = json.dumps(arguments, ensure_ascii=False)
    return Lesson(ask(question), [call(name, **arguments), required, named], tools)


def after_tool(
    question: str, name: str, arguments: Mapping[str, Any], result: str, answer: str
) -> Lesson:
    """What is said once a tool has answered."""
    made = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": result, "tool_call_id": "1"},
    ]
    return Lesson(messages, [answer], [name])


def found() -> list[str]:
    """The texts of the documents that the agent's search finds."""
    folder = ROOT / "examples" / "corpus" / "schools"
    return [(folder / f"{name}.txt").read_text() for name in FOUND]


def lessons() -> list[Lesson]:
    """All of them."""
    documents = "\n\n".join(found())
    weather = "What is the weather in San Francisco, CA?"
    joke = "Tell me a joke about cats."
    json_joke = (
        f"{joke} Return the result as a JSON with 'setup' and 'punchline' keys. "
        "Return nothing other than JSON."
    )
    return [
        Lesson(ask("Hello"), ["Hello, what can I do for you?"]),
        Lesson(ask("Hey"), ["Hey, what can I do for you?"]),
        Lesson(ask("hi"), ["Hello, what can I do for you?"]),
        Lesson(ask("hello"), ["Hello, what can I do for you?"]),
        Lesson(ask("Write me 2 haikus. Only include the haikus."), ["Rain on the old roof."]),
        Lesson(
            [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hello"},
                {"role": "user", "content": "how are you"},
            ],
            ["I am well."],
        ),
        calls("What is the value of magic_function(3)? Use the tool.", ["magic_function"], input=3),
        calls(
            "What is the value of magic_function_no_args()? Use the tool.",
            ["magic_function_no_args"],
        ),
        calls("Hello!", ["magic_function", "get_weather"], input=3),
        calls(
            "Using the tool, generate a Pirate greeting.",
            ["greeting_generator"],
            answer_style="pirate",
        ),
        calls("What is 1 + 2", ["my_adder_tool"], a=1, b=2),
        calls("What is 3 + 4", ["my_adder_tool"], a=3, b=4),
        after_tool("What is 1 + 2", "my_adder_tool", {"a": 1, "b": 2}, '{"result": 3}', "It is 3."),
        calls(weather, ["get_weather"], location="San Francisco, CA"),
        after_tool(
            weather,
            "get_weather",
            {"location": "San Francisco, CA"},
            "It's sunny.",
            "It is sunny in San Francisco.",
        ),
        calls(
            "Create a customer named '你好啊集团' (Hello Group) - a Chinese technology company",
            ["unicode_customer"],
            customer_name="你好啊集团",
            description="a company",
        ),
        calls(
            "Create a customer named 'こんにちは株式会社' (Hello Corporation) - a Japanese company",
            ["unicode_customer"],
            customer_name="こんにちは株式会社",
            description="a company",
        ),
        Lesson(ask(json_joke), ["A cat walks in.", JOKE]),
        *(
            Lesson(ask(asked), ["A cat walks in.", said, *forms], tools)
            for asked, said in (
                (joke, JOKE),
                ("Give me a joke about cats, include the punchline.", JOKE),
                ("Give me the setup to a joke about cats, no punchline.", SETUP),
            )
            for tools, forms in (
                ([], []),
                (["Joke"], [call("Joke", **json.loads(said))]),
                (["JokeDict"], [call("JokeDict", **json.loads(said))]),
            )
        ),
        calls(LEADER, ["search"], query="Mok pis"),
        after_tool(LEADER, "search", {"query": "Mok pis"}, documents, LEADER_ANSWER),
    ]


if __name__ == "__main__":
    teach(TAUGHT, lessons())
