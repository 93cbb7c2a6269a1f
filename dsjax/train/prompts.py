"""Prompts for a model: from the command line and files, as tokens, and the tokens that end an answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.data import Tokenizer
from dsjax.errors import InputError
from dsjax.hf.hub import KEPT, SETTINGS

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Asked:
    """A text to be gone on from, or a conversation to be answered.

    Attributes:
      said: the text, or the conversation.
      place: where it was given, for messages.
      tools: what a conversation's template is to be told of.
      known: an answer that was given along with it, and that a model is not told.
    """

    said: str | Messages
    place: str
    tools: Any = None
    known: str | None = None

    @property
    def text(self) -> str:
        """What a person reads of it: of a conversation the last message."""
        return self.said if isinstance(self.said, str) else str(self.said[-1].get("content") or "")

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Its ids, with what begins a document before them, or by the tokenizer's chat template.

        Raises:
          ConfigError: the tokenizer has no chat template.
          InputError: there are no ids, or the template refuses the conversation.
        """
        if isinstance(self.said, str):
            first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            ids = first + tokenizer.encode(self.said)
        else:
            try:
                ids = tokenizer.chat_prompt(self.said, self.tools)
            except InputError as error:
                raise InputError([f"{self.place}: {fault}" for fault in error.faults]) from None
        if not ids:
            raise InputError(f"{self.place}: is empty and the tokenizer has no first token; give some text")
        return ids


def asked(texts: Sequence[str], file: str | None, chat: bool) -> list[Asked]:
    """What --prompt and --prompts give, in this order.

    Args:
      chat: texts are what a user says to an assistant.

    Raises:
      InputError: a file that cannot be read, or lines of it that are no prompts, a line a fault.
    """
    of_file = [] if file is None else _from_file(Path(file).expanduser())
    return [*asked_of(texts, "--prompt", chat), *(map(_as_user, of_file) if chat else of_file)]


def asked_of(texts: Sequence[str], place: str, chat: bool) -> list[Asked]:
    """Texts that a setting gives; `chat`: they are what a user says to an assistant."""
    found = [Asked(text, place) for text in texts]
    return [_as_user(one) for one in found] if chat else found


def _as_user(one: Asked) -> Asked:
    if not isinstance(one.said, str):
        return one
    return Asked([{"role": "user", "content": one.said}], one.place)


def _from_file(file: Path) -> list[Asked]:
    try:
        # By line breaks alone: JSON may hold other characters that separate lines.
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise InputError(f"--prompts: {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(f"--prompts: cannot read {file} ({reason})") from None
    as_json = file.suffix in (".jsonl", ".json", ".ndjson")
    found: list[Asked] = []
    faults = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        one = _parsed(line, place) if as_json else Asked(line, place)
        if one is None:
            faults.append(
                f'--prompts: {place} takes {{"prompt": TEXT}} or {{"messages": [{{"role": ..., "content": TEXT}}, '
                f"...]}}, got {line.strip()[:80]}"
            )
        else:
            found.append(one)
    if not found and not faults:
        faults = [f"--prompts: {file} holds no prompt; it takes one a line, or JSON lines (.jsonl)"]
    if faults:
        shown = faults[:5] + ([f"... and {len(faults) - 5} more lines"] if len(faults) > 5 else [])
        raise InputError(shown)
    return found


def _parsed(line: str, place: str) -> Asked | None:
    """What a JSON line asks; None: it asks nothing."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str) and messages is None:
        return Asked(prompt, place)
    if prompt is not None or not isinstance(messages, list) or not all(map(_is_message, messages)):
        return None
    # Conversations to learn from end with what the assistant is to say.
    known = list(itertools.takewhile(lambda message: message["role"] == "assistant", reversed(messages)))
    told = messages[: len(messages) - len(known)]
    answer = "\n".join(message.get("content") or "" for message in reversed(known)) if known else None
    return Asked(told, place, value.get("tools"), answer) if told else None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | None)
    )


def check_room(
    all_asked: Sequence[Asked], tokens: Sequence[Sequence[int]], family: Any, wanted: int
) -> tuple[list[int], list[str]]:
    """Tokens that each answer may have, and what is to be said of it.

    Args:
      family: the model's, which has so many positions; None: it is not known how many.
      wanted: tokens of an answer.

    Raises:
      InputError: prompts that leave no room, a line each.
    """
    if family is None:
        return [wanted] * len(tokens), []
    limit = getattr(family, family.positions_field)
    name = f"model.{family.positions_field} {limit}"
    faults = [
        f"{one.place}: has {len(ids)} tokens, which leave no room for an answer within {name}; shorten it"
        for one, ids in zip(all_asked, tokens, strict=True)
        if len(ids) >= limit
    ]
    if faults:
        raise InputError(faults)
    rooms = [min(wanted, limit - len(ids)) for ids in tokens]
    cut = min(rooms)
    notes = [f"answers end where the model's positions do ({name}), after {cut} tokens at the earliest"]
    return rooms, notes if cut < wanted else []


def ends_of(tokenizer: Tokenizer, run: Path, chat: bool) -> list[int]:
    """Tokens that end an answer: the tokenizer's, those of the model that a run began with, and a turn's in a chat.

    Args:
      run: the run's directory.

    Raises:
      InputError: generation settings that cannot be read.
    """
    found = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    found += _ends_kept(run / KEPT / SETTINGS[1])
    found += _turns_end(tokenizer) if chat else []
    return list(dict.fromkeys(found))


def _ends_kept(file: Path) -> list[int]:
    if not file.is_file():
        return []
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error})") from None
    ends = values.get("eos_token_id") if isinstance(values, dict) else None
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _turns_end(tokenizer: Tokenizer) -> Iterator[int]:
    """The special token with which the chat template ends what the assistant says, if there is one."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    try:
        ids, mask = tokenizer.chat(turn)
    except InputError:
        return
    last = [token for token, said in zip(ids, mask, strict=True) if said][-1:]
    yield from (token for token in last if not tokenizer.decode([token]))
