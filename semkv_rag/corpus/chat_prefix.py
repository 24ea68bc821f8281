"""The prefix of prompts that go through a chat template."""

from __future__ import annotations

from typing import Any

from semkv_rag.errors import OptionError

_MARKER = "THE RETRIEVED TEXTS"


def chat_prefix(tokenizer: Any, user: str = "", system: str | None = None) -> str:
    """What the chat template makes of the beginning of a conversation, up to the retrieved texts.

    Args:
        tokenizer: of Transformers.
        user: what the user's message begins with.
        system: the system message; None: none, or the template's own.

    Raises:
        OptionError: the model has no chat template, or it does not take these messages.
    """
    user += _MARKER
    made = _made(tokenizer, user, system)
    if _MARKER not in made:  # as templates of models that take images have it
        parts = [{"type": "text", "text": user}]
        made = _made(tokenizer, parts, system and [{"type": "text", "text": system}])
    prefix, found, _ = made.partition(_MARKER)
    if not found:
        raise OptionError(
            "the chat template leaves out the user's message: give --prefix as a text"
        )
    return prefix


def _made(tokenizer: Any, user: Any, system: Any) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, and raises what it likes
        raise OptionError(
            f"the chat template does not take the messages: {str(error).splitlines()[0]}"
        ) from error
    return str(text)
