"""Tokenizers: raw bytes, one trained on the spot, or a Hugging Face tokenizer's files.

`encode` never adds or recognises special tokens: text stays text. Documents are framed in one place
(`Tokenizer.frame`), conversations by the tokenizer's own template (`dsjax.data.chat`), so BOS and EOS
stand exactly once whatever a tokenizer's post-processor would add.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsjax.data.chat import ChatTemplate
from dsjax.errors import ConfigError, InputError
from dsjax.hf.hub import local

if TYPE_CHECKING:
    from dsjax.config import Config

BOS, EOS = "<|bos|>", "<|eos|>"
TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_KNOWN_BOS = (BOS, "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>")
_KNOWN_EOS = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
"""Looked for only where no tokenizer_config.json beside the tokenizer.json tells."""

_PIECE = 4 << 20


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
      vocab_size: one more than the largest id.
      bos_id, eos_id: ids of the tokens that begin and end a document; None where there is none.
      fingerprint: differs between tokenizers that encode differently; part of cache keys.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: no BOS or EOS, and no special token is recognised in it."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Args:
          special: write special tokens by their names instead of leaving them out.
        """

    @abstractmethod
    def spec(self) -> dict[str, str]:
        """What `from_spec` makes the same tokenizer of, in another process."""

    def frame(self, ids: Sequence[int]) -> list[int]:
        """A document's ids with BOS before and EOS after.

        A tokenizer without BOS begins documents with EOS, as the models that have none were trained.
        """
        start = self.bos_id if self.bos_id is not None else self.eos_id
        return [
            *([] if start is None else [start]),
            *ids,
            *([] if self.eos_id is None else [self.eos_id]),
        ]

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        """A conversation by the tokenizer's own template, BOS once.

        Returns:
          ids, and for each id 1 where it is the assistant's (its end token included), else 0.

        Raises:
          ConfigError: the tokenizer has no chat template.
          InputError: the template refuses the conversation or changes earlier turns.
        """
        raise self._no_template()

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """The ids of a conversation up to where the assistant is to speak, BOS once.

        Raises:
          ConfigError, InputError: as `chat`.
        """
        raise self._no_template()

    def _no_template(self) -> ConfigError:
        return ConfigError(
            f"data.tokenizer: {self.name} has no chat template; "
            "chat needs the directory of a tokenizer that has one"
        )

    @property
    def name(self) -> str:
        """What messages call it."""
        return "bytes"


class ByteTokenizer(Tokenizer):
    """256 bytes, BOS and EOS."""

    vocab_size = 258
    bos_id, eos_id = 256, 257
    fingerprint = "bytes-258"

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text whose UTF-8 bytes `ids` are; see `Tokenizer.decode`."""
        names = {self.bos_id: BOS.encode(), self.eos_id: EOS.encode()} if special else {}
        found = (bytes([i]) if 0 <= i < 256 else names.get(i, b"") for i in ids)
        return b"".join(found).decode(errors="replace")

    def spec(self) -> dict[str, str]:
        """See `Tokenizer.spec`."""
        return {"kind": "bytes"}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, with the special tokens and the chat template that stand beside it.

    Raises:
      InputError: a file that is missing, broken or names tokens that the vocabulary lacks.
    """

    def __init__(self, file: Path):
        self.file = file
        self._settings = _settings_beside(file)
        self._tokens, content = _load_json(file)
        self._tokens.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokens.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size == 0:
            raise InputError(f"data.tokenizer: {file} has an empty vocabulary")
        self.bos_id = self._special("bos_token", _KNOWN_BOS)
        self.eos_id = self._special("eos_token", _KNOWN_EOS)
        template = self._settings.get("chat_template")
        self._template = (
            None if template is None else ChatTemplate(template, self._template_tokens(), str(file))
        )
        told = json.dumps([template, self.bos_id, self.eos_id]).encode()
        self.fingerprint = hashlib.blake2b(content + told, digest_size=16).hexdigest()

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.file)

    @functools.cached_property
    def _templated(self) -> Any:
        """A second one, which recognises special tokens: that is a setting of the whole object."""
        return _load_json(self.file)[0]

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        tokens = self._tokens.get_added_tokens_decoder()
        return {number for number, token in tokens.items() if token.special}

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode_batch`; a text of many megabytes is encoded in pieces of lines."""
        pieces = [_pieces(text) for text in texts]
        flat = [piece for text in pieces for piece in text]
        encoded = iter(self._tokens.encode_batch_fast(flat, add_special_tokens=False))
        return [[i for _ in text for i in next(encoded).ids] for text in pieces]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """See `Tokenizer.decode`."""
        return str(self._tokens.decode([int(i) for i in ids], skip_special_tokens=not special))

    def spec(self) -> dict[str, str]:
        """See `Tokenizer.spec`."""
        return {"kind": "file", "path": str(self.file.absolute())}

    def copy_to(self, directory: Path) -> None:
        """Copies the tokenizer's files into a directory, which `data.tokenizer` then can name."""
        directory.mkdir(exist_ok=True)
        for name in (_CONFIG_FILE, _TEMPLATE_FILE):
            if self.file.with_name(name).is_file():
                shutil.copyfile(self.file.with_name(name), directory / name)
        shutil.copyfile(self.file, directory / TOKENIZER_FILE)

    def begun(self) -> dict[str, bytes]:
        """Files of the tokenizer, by name, with which the transformers library begins a text as rows do here: with BOS.

        Empty where it does so anyway, or there is none.
        """
        import tokenizers

        tokens = self._templated
        if self.bos_id is None or tokens.encode("a").ids[:1] == [self.bos_id]:
            return {}
        first = tokens.id_to_token(self.bos_id)
        new, _ = _load_json(self.file)
        template = tokenizers.processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", "$B"], special_tokens=[(first, self.bos_id)]
        )
        own = [] if new.post_processor is None else [new.post_processor]
        new.post_processor = tokenizers.processors.Sequence([*own, template])
        ends = {} if self.eos_id is None else {"eos_token": tokens.id_to_token(self.eos_id)}
        # Another class makes a post-processor of its own.
        settings = {
            **self._settings,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": first,
            **ends,
        }
        return {TOKENIZER_FILE: new.to_str().encode(), _CONFIG_FILE: json.dumps(settings, indent=2).encode()}

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        """See `Tokenizer.chat`."""
        if self._template is None:
            return super().chat(messages, tools)
        text, spans = self._template.render(messages, tools)
        encoding = self._templated.encode(text, add_special_tokens=False)
        ids, mask = list(encoding.ids), [0] * len(encoding.ids)
        special = self._special_ids
        starts = [start for start, _ in encoding.offsets]
        for begin, end in spans:
            inside = [n for n, start in enumerate(starts) if begin <= start < end]
            ends = [n for n in inside if ids[n] in special]
            # A template's line break after the end token is nothing that the assistant says.
            last = ends[-1] if ends and not text[encoding.offsets[ends[-1]][1] : end].strip() else None
            for n in inside:
                mask[n] = int(last is None or n <= last)
        ids = self._begun(ids)
        mask = [0] * (len(ids) - len(mask)) + mask
        unended = bool(spans) and spans[-1][1] == len(text) and mask[-1] == 1 and ids[-1] not in special
        if unended and self.eos_id is not None:
            ids, mask = [*ids, self.eos_id], [*mask, 1]
        return ids, mask

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """See `Tokenizer.chat_prompt`."""
        if self._template is None:
            return super().chat_prompt(messages, tools)
        text = self._template.prompt(messages, tools)
        return self._begun(list(self._templated.encode(text, add_special_tokens=False).ids))

    def _begun(self, ids: list[int]) -> list[int]:
        """A conversation's ids with BOS before them, if the template has put none there."""
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _special(self, key: str, known: Sequence[str]) -> int | None:
        if key in self._settings:
            token = _token_text(self._settings[key])
            if token is None:
                return None
            number = self._tokens.token_to_id(token)
            if number is None:
                raise InputError(f"data.tokenizer: {self.file} has no token {token}, which its {key} names")
            return int(number)
        found = (self._tokens.token_to_id(token) for token in known)
        return next((int(number) for number in found if number is not None), None)

    def _template_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        texts = {name: _token_text(self._settings.get(name)) for name in names}
        return {name: text for name, text in texts.items() if text is not None}


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        # After a line break; in text without any, wherever it falls.
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _load_json(file: Path) -> tuple[Any, bytes]:
    import tokenizers

    try:
        content = file.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise InputError(f"data.tokenizer: cannot read {file} ({error.strerror})") from None
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        reason = next(iter(str(error).splitlines()), "unknown format")
        raise InputError(f"data.tokenizer: {file} is no tokenizer.json that can be read ({reason})") from None
    # What a file was saved with; here rows are cut and padded in one place.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, content


def _settings_beside(file: Path) -> dict[str, Any]:
    """tokenizer_config.json and the chat template's own file, where they exist."""
    settings: dict[str, Any] = {}
    config, template = file.with_name(_CONFIG_FILE), file.with_name(_TEMPLATE_FILE)
    try:
        if config.is_file():
            settings = json.loads(config.read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise InputError(f"data.tokenizer: {config} takes a JSON object")
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"data.tokenizer: {config.parent}: cannot read its settings ({error})") from None
    given = settings.get("chat_template")
    if isinstance(given, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        settings["chat_template"] = named.get("default")
    if not isinstance(settings.get("chat_template"), str | None):
        raise InputError(f"data.tokenizer: {config}: chat_template takes text")
    return settings


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def from_spec(spec: Mapping[str, str]) -> Tokenizer:
    """The tokenizer that `Tokenizer.spec` described.

    Raises:
      InputError: its file cannot be read.
    """
    return ByteTokenizer() if spec["kind"] == "bytes" else HuggingFaceTokenizer(Path(spec["path"]))


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; `bpe` is trained first if it is not in the cache.

    Raises:
      InputError: files that are missing or broken, or no documents to train on.
    """
    name = config.data.tokenizer
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        from dsjax.data.bpe import trained

        return HuggingFaceTokenizer(trained(config.data))
    path = local(name, "data.tokenizer", "tokenizer")
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        what = f"directory {path} holds no {TOKENIZER_FILE}" if path.is_dir() else f"{path} does not exist"
        raise InputError(
            f"data.tokenizer: {what}; it takes bytes, bpe, a {TOKENIZER_FILE} or its directory, or hf://org/name"
        )
    return HuggingFaceTokenizer(file)
