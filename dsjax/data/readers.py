"""Documents out of files, and every fault of a file named with its place.

A file is read in parts, so that several processes can share a large one: a part of a text file is
the whole file (one document), of JSONL a byte range (the lines that begin in it), of Parquet some
row groups, of ArrayRecord a range of records.  Nothing read here is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.data.sources import InputFile
from dsjax.errors import InputError

RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"


@dataclass(frozen=True)
class Part:
    """A stretch of one file, in the units of its kind, and roughly how many bytes it holds."""

    file: int
    start: int
    stop: int
    weight: int


@dataclass(frozen=True)
class Document:
    """One document: its number within its part, its content, and where it stands.

    `text` is the content of every kind but chat; a conversation has `messages` (and `tools`).
    `position` counts what the kind counts: the byte at which a line begins, rows, records.
    """

    record: int
    path: str
    position: int
    text: str = ""
    messages: Sequence[dict[str, Any]] | None = None
    tools: Any = None

    @property
    def empty(self) -> bool:
        return not self.text and not self.messages

    @property
    def place(self) -> str:
        """Where a person finds it: the file, and for a conversation the line."""
        if self.messages is None:
            return self.path
        return f"{self.path}:{_line_number(self.path, self.position)}"


def content_hash(document: Document) -> int:
    """64 bits of what the document says, wherever it lies: the held-out slice is chosen by it."""
    if document.messages is None:
        content = document.text.encode()
    else:
        content = json.dumps([document.messages, document.tools], sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def plan_parts(kind: str, files: Sequence[InputFile], target: int) -> list[Part]:
    """Cuts `files` into parts of about `target` bytes where the kind can be cut.

    The cut depends on the files and `target` only, never on the machine.
    """
    if kind == "text":
        return [Part(i, 0, file.size, file.size) for i, file in enumerate(files)]
    if kind in ("jsonl", "chat"):
        return [
            Part(i, start, min(start + target, file.size), min(target, file.size - start))
            for i, file in enumerate(files)
            for start in range(0, max(file.size, 1), target)
        ]
    if kind == "parquet":
        return [part for i, file in enumerate(files) for part in _parquet_parts(i, file)]
    return [part for i, file in enumerate(files) for part in _record_parts(i, file, target)]


def read_documents(kind: str, file: InputFile, part: Part, field: str) -> Iterator[Document]:
    """The documents of one part, in order, empty ones included.

    Raises InputError with one line: the file, the line or record, what is wrong.
    """
    try:
        if kind == "text":
            yield _read_text(file)
        elif kind in ("jsonl", "chat"):
            yield from _read_lines(kind, file, part, field)
        elif kind == "parquet":
            yield from _read_parquet(file, part, field)
        else:
            yield from _read_records(file, part)
    except OSError as error:
        raise InputError(f"{file.path}: cannot be read ({error.strerror or error})") from None


# ---- text


def _read_text(file: InputFile) -> Document:
    with open(file.path, "rb") as stream:
        content = stream.read()
    if len(content) != file.size:
        raise _changed(file)
    try:
        return Document(0, file.path, 0, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file.path}:{line}: {_not_utf8(error)}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
    return f"not UTF-8 text ({byte}; {error.reason}); convert the file or leave it out"


def _changed(file: InputFile) -> InputError:
    return InputError(f"{file.path}: changed while it was read; start again once it is complete")


# ---- JSON lines


def _read_lines(kind: str, file: InputFile, part: Part, field: str) -> Iterator[Document]:
    parse = _conversation if kind == "chat" else _text_field
    with open(file.path, "rb") as stream:
        status = os.fstat(stream.fileno())
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise _changed(file)
        position = part.start
        if position:
            # The line that holds the byte before belongs to the part before.
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
        record = 0
        while position < part.stop:
            begin, line = position, stream.readline()
            position += len(line)
            if begin == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield parse(line, field, record, file.path, begin)
            except _Fault as fault:
                raise InputError(f"{file.path}:{_line_number(file.path, begin)}: {fault}") from None
            record += 1


class _Fault(Exception):
    """What is wrong with one record; the caller knows its place."""


def _line_number(path: str, position: int) -> int:
    """The number, from 1, of the line that begins at byte `position`."""
    count = 0
    with open(path, "rb") as stream:
        while position > 0 and (block := stream.read(min(position, 1 << 20))):
            count += block.count(b"\n")
            position -= len(block)
    return count + 1


def _parse_object(line: bytes, field: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _Fault(_not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise _Fault(f"not JSON ({error.msg} at column {error.colno}); is the file cut off here?") from None
    except RecursionError:
        raise _Fault("not JSON that can be read (nested too deep)") from None
    except ValueError as error:
        raise _Fault(f"not JSON that can be read ({error})") from None
    if not isinstance(record, dict):
        raise _Fault(f"takes a JSON object a line, got {type(record).__name__}")
    if field not in record:
        raise _Fault(f"has no field {field} (it has {', '.join(sorted(record)) or 'none'}); set data.field")
    return record


def _text_field(line: bytes, field: str, record: int, path: str, position: int) -> Document:
    value = _parse_object(line, field)[field]
    if value is not None and not isinstance(value, str):
        raise _Fault(f"field {field} takes text, got {type(value).__name__}")
    return Document(record, path, position, _whole(value or ""))


def _whole(text: str) -> str:
    r"""`text` itself, once it is sure that UTF-8 can hold it (JSON's \ud800 cannot)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Fault("holds half of a surrogate pair, which is no text") from None
    return text


# Who speaks in ShareGPT's records.
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip


def _as_message(message: Any) -> Any:
    """ShareGPT's from and value as role and content; anything else as it is."""
    speaker = message.get("from") if isinstance(message, dict) else None
    if not isinstance(speaker, str) or "role" in message or speaker not in _ROLES:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": _ROLES[speaker], "content": message.get("value"), **rest}


def _conversation(line: bytes, field: str, record: int, path: str, position: int) -> Document:
    content = _parse_object(line, field)
    messages = content[field]
    if not isinstance(messages, list):
        raise _Fault(f"field {field} takes a list of messages, got {type(messages).__name__}")
    messages = [_as_message(message) for message in messages]
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Fault(
                f"message {number} takes an object with a role and content (or from and value, the former one of "
                f"{', '.join(_ROLES)})"
            )
        if not isinstance(message.get("content"), str | None):
            raise _Fault(f"message {number}: content takes text, got {type(message['content']).__name__}")
    _whole(json.dumps([messages, content.get("tools")], ensure_ascii=False))
    return Document(record, path, position, messages=messages, tools=content.get("tools"))


# ---- Parquet


def _parquet(file: InputFile) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{file.path}: Parquet needs pyarrow: pip install 'dsjax[parquet]'") from None
    try:
        return pyarrow.parquet.ParquetFile(file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file.path}: no Parquet file that can be read ({_first_line(error)})") from None


def _parquet_parts(position: int, file: InputFile) -> Iterator[Part]:
    with _parquet(file) as table:
        for group in range(table.num_row_groups):
            yield Part(position, group, group + 1, table.metadata.row_group(group).total_byte_size)


def _read_parquet(file: InputFile, part: Part, field: str) -> Iterator[Document]:
    import pyarrow

    with _parquet(file) as table:
        names = table.schema_arrow.names
        if field not in names:
            raise InputError(
                f"{file.path}: has no column {field} (it has {', '.join(names)}); set data.field"
            )
        before = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        record = 0
        try:
            for batch in table.iter_batches(1024, range(part.start, part.stop), [field]):
                for value in batch.column(0).to_pylist():
                    if value is not None and not isinstance(value, str):
                        kind = type(value).__name__
                        raise InputError(f"{file.path}: column {field} takes text, got {kind}")
                    yield Document(record, file.path, before + record, value or "")
                    record += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            row = before + record
            raise InputError(f"{file.path}: damaged at row {row} or later ({_first_line(error)})") from None


# ---- ArrayRecord


def open_records(path: str) -> Any:
    """A reader of an ArrayRecord file for random access.

    Raises InputError for a file that is missing, cut off or of another format.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path, RANDOM_ACCESS, file_reader_buffer_size=32768)
    if not reader.ok():
        # Such a reader only says that it holds 0 records; closing it tells why.
        try:
            reader.close()
            reason = "unknown format"
        except RuntimeError as error:
            reason = _first_line(error)
        raise InputError(f"{path}: no ArrayRecord file that can be read ({reason})")
    return reader


def _record_parts(position: int, file: InputFile, target: int) -> Iterator[Part]:
    reader = open_records(file.path)
    count = reader.num_records()
    reader.close()
    step = max(1, count * target // max(file.size, 1))
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield Part(position, start, stop, file.size * (stop - start) // count)


def _read_records(file: InputFile, part: Part) -> Iterator[Document]:
    reader = open_records(file.path)
    try:
        for number in range(part.start, part.stop):
            place = f"{file.path}: record {number}"
            try:
                text = reader.read([number])[0].decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: {_not_utf8(error)}") from None
            except RuntimeError as error:
                raise InputError(f"{place}: damaged ({_first_line(error)})") from None
            yield Document(number - part.start, file.path, number, text)
    finally:
        reader.close()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
