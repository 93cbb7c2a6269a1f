"""What a model answers, for people and for scripts: as it is drawn, whole, or as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from dsjax.data import Tokenizer
from dsjax.train.assemble import Assembled
from dsjax.train.generation import Generator
from dsjax.train.next_tokens import Prompt
from dsjax.train.prompts import Asked, check_room, ends_of
from dsjax.train.sampling import Sampling
from dsjax.train.state import State

# Tokens before a new one with which it is turned into text: some tokenizers write a first word otherwise.
_CONTEXT = 8
_INCOMPLETE = "\ufffd"


class Spoken:
    """The text of tokens as they come; a character that still lacks bytes waits for them.

    Args:
      before: the tokens that they go on from.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]):
        self._decode = tokenizer.decode
        self._ids = list(before[-_CONTEXT:])
        self._first, self._told = 0, len(self._ids)

    def add(self, token: int) -> str:
        """What can be told with one token more."""
        self._ids.append(token)
        return self._new(whole=False)

    def rest(self) -> str:
        """What is left although it lacks bytes."""
        return self._new(whole=True)

    def _new(self, whole: bool) -> str:
        known = self._decode(self._ids[self._first : self._told])
        text = self._decode(self._ids[self._first :])
        if text.endswith(_INCOMPLETE) and not whole:
            return ""
        new = text[len(known) :]
        if new:
            self._first, self._told = self._told, len(self._ids)
        return new


@dataclass
class _Answer:
    """One answer in the making, to prompt `number` the `sample`th."""

    asked: Asked
    number: int
    sample: int
    prompt: Prompt
    spoken: Spoken
    text: str = ""
    tokens: int = 0

    def add(self, token: int | None) -> str:
        """The text that a token, or the answer's end, adds."""
        new = self.spoken.rest() if token is None else self.spoken.add(token)
        self.tokens += token is not None
        self.text += new
        return new

    def record(self) -> str:
        """It as a line of JSON."""
        said = self.asked.said
        told = {"prompt": said} if isinstance(said, str) else {"messages": said}
        ended = "length" if self.tokens == self.prompt.room else "end"
        known = {} if self.asked.known is None else {"reference": self.asked.known}
        rest = {"answer": self.text, "tokens": self.tokens, "ended": ended}
        line = {"number": self.number, "sample": self.sample, **told, **known, **rest}
        return json.dumps(line, ensure_ascii=False) + "\n"

    def page(self, several: bool) -> str:
        """It under what was asked: a text goes on, a conversation is answered on a line of its own.

        Args:
          several: there are other answers to the same.
        """
        of = f", answer {self.sample}" if several else ""
        between = "" if isinstance(self.asked.said, str) else "\n"
        return f"--- prompt {self.number}{of}\n{self.asked.text}{between}{self.text}\n"


class _Clock:
    """Tokens and the time they took."""

    def __init__(self) -> None:
        self._begun = self._first = time.monotonic()
        self._tokens = 0

    def tick(self) -> None:
        """A token more."""
        self._tokens += 1
        if self._tokens == 1:
            self._first = time.monotonic()

    def line(self) -> str:
        """What is told of it."""
        now, waited = time.monotonic(), self._first - self._begun
        told = f"{self._tokens} tokens in {now - self._begun:.1f} s"
        if self._tokens < 2 or now <= self._first:
            return told
        return f"{told}: the first after {waited:.1f} s, then {(self._tokens - 1) / (now - self._first):.1f} tokens/s"


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a model.

    Attributes:
      tokens: of an answer at most.
      samples: answers to each prompt.
      at_once: answers that are computed together.
    """

    tokens: int
    sampling: Sampling
    seed: int = 0
    samples: int = 1
    at_once: int = 16


@dataclass(frozen=True)
class Questions:
    """What is asked, as tokens, how long answers may become and what ends them; notes are for people."""

    asked: Sequence[Asked]
    tokens: Sequence[Sequence[int]]
    rooms: Sequence[int]
    ends: Sequence[int]
    notes: Sequence[str]

    @staticmethod
    def of(job: Assembled, asked: Sequence[Asked], wanted: int) -> Questions:
        """Those to a job's model, with so many tokens of an answer at most.

        Raises:
          ConfigError, InputError: prompts that have no tokens or leave no room, a tokenizer without a chat template.
        """
        tokens = [one.tokens(job.tokenizer) for one in asked]
        rooms, notes = check_room(asked, tokens, job.model.family, wanted)
        chat = any(not isinstance(one.said, str) for one in asked)
        known = sum(one.known is not None for one in asked)
        if known:
            notes = [
                *notes,
                f"{known} of {len(asked)} conversations end with the assistant's own words, which are left out",
            ]
        return Questions(
            asked, tokens, rooms, ends_of(job.tokenizer, Path(job.config.run.directory), chat), notes
        )


def answer(
    job: Assembled,
    state: State,
    questions: Questions,
    wanted: Wanted,
    *,
    as_json: bool = False,
    timed: bool = True,
) -> None:
    """Tells answers on stdout of process 0: a single one as it is drawn, of several each as soon as it ends.

    Args:
      as_json: a line of JSON an answer.
      timed: how long they took is told on stderr.
    """
    generator = Generator(job.trainer.program, wanted.sampling, questions.ends)
    for note in (*questions.notes, *filter(None, [generator.whole_because])):
        _say(note)
    every = [
        _Answer(
            one, number, sample, Prompt(ids, room, (wanted.seed, number, sample)), Spoken(job.tokenizer, ids)
        )
        for number, (one, ids, room) in enumerate(
            zip(questions.asked, questions.tokens, questions.rooms, strict=True), 1
        )
        for sample in range(1, wanted.samples + 1)
    ]
    streams = len(every) == 1 and not as_json
    if streams and isinstance(every[0].asked.said, str):
        _write(every[0].asked.said)
    clock = _Clock()
    for index, token in generator.answers(state, [one.prompt for one in every], wanted.at_once):
        one = every[index]
        new = one.add(token)
        if token is not None:
            clock.tick()
        if streams:
            _write(new if token is not None else f"{new}\n")
        elif token is None:
            _write(one.record() if as_json else one.page(wanted.samples > 1))
    if timed:
        _say(clock.line())


def _write(text: str) -> None:
    if text and jax.process_index() == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(f"dsjax: {line}", file=sys.stderr, flush=True)
