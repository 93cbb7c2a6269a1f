"""Conversations as text, through a tokenizer's own chat template, with the assistant's parts marked."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsjax.errors import InputError

# Noncharacters of Unicode, which no text holds: they bracket what {% generation %} encloses.
_BEGIN, _END = "\ufdd0", "\ufdd1"

Spans = list[tuple[int, int]]


class ChatTemplate:
    """A Jinja chat template, rendered in a sandbox that cannot change or reach anything.

    Args:
      source: the template.
      tokens: bos_token and the like, as the template names them.
      place: the file it is from, for messages.

    Raises:
      InputError: the template is no valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], place: str):
        self._tokens, self._place = dict(tokens), place
        self._marks = re.search(r"\bgeneration\s*-?%}", source) is not None
        self._template = _compile(source, place)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, Spans]:
        """The whole text, and the (begin, end) of each part that is the assistant's to say.

        A template with {% generation %} blocks tells these itself. For another, a turn is what the
        template adds to the conversation before it.

        Raises:
          InputError: the template refuses the conversation, or it cannot be told what a turn adds.
        """
        text = self._text(messages, tools)
        if self._marks:
            return _unmarked(text)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:number], tools, prompt=True)
                turn = self._text(messages[: number + 1], tools)
                spans.append(self._span(text, before, turn, message.get("content") or "", number))
        return text, spans

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """The whole text, up to where the assistant is to speak.

        Raises:
          InputError: the template refuses the conversation.
        """
        return _unmarked(self._text(messages, tools, prompt=True))[0]

    def _span(self, text: str, before: str, turn: str, content: str, number: int) -> tuple[int, int]:
        """Where a turn stands in the whole `text`, from both as they are without what follows.

        A template may leave the beginning of a turn (its reasoning) out of longer conversations.
        """
        said = turn[len(before) :]
        ending = (content.strip().splitlines() or [""])[-1]
        if text.startswith(before) and turn.startswith(before):
            for skipped in range(len(said)):
                rest = said[skipped:]
                if text.startswith(rest, len(before)) and ending in rest:
                    return len(before), len(before) + len(rest)
        raise InputError(
            f"the chat template of {self._place} changes turn {number + 1} with what stands around it, so "
            "the assistant's tokens cannot be told; enclose them in {% generation %} ... {% endgeneration %}"
        )

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._template.render(
                    messages=list(messages), tools=tools, add_generation_prompt=prompt, **self._tokens
                )
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(f"the chat template of {self._place} refuses it: {error}") from None


def _unmarked(text: str) -> tuple[str, Spans]:
    parts: list[str] = []
    spans: Spans = []
    length = begin = 0
    for piece in text.replace(_END, _BEGIN).split(_BEGIN):
        # Outside and inside pieces take turns.
        if len(parts) % 2:
            spans.append((begin, begin + len(piece)))
        parts.append(piece)
        length += len(piece)
        begin = length
    return "".join(parts), spans


@functools.cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: what it encloses is the assistant's."""

        tags = {"generation"}  # noqa: RUF012  as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _compile(source: str, place: str) -> Any:
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise InputError(f"data.tokenizer: the chat template of {place} is not valid ({error})") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes characters for web pages.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)
