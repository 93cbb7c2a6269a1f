"""What is asked of a model, and how its answers are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsjax.config import from_dict
from dsjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from dsjax.errors import ConfigError, InputError
from dsjax.train.answers import Questions, Spoken, Wanted, answer
from dsjax.train.assemble import assemble
from dsjax.train.prompts import Asked, asked, check_room, ends_of
from dsjax.train.sampling import Sampling

CHAT = Path(__file__).parent.parent / "data" / "fixtures" / "chat_tokenizer"
TURN = [{"role": "user", "content": "hi"}]


def test_a_character_waits_for_its_bytes() -> None:
    spoken = Spoken(ByteTokenizer(), b"word ")
    text = "aé→\U0001f600"
    told = [spoken.add(byte) for byte in text.encode()]
    assert "".join(told) == text and told[1:6] == ["", "é", "", "", "→"]
    assert spoken.add(0xC3) == "" and spoken.rest() == "\ufffd" and spoken.rest() == ""


def test_a_first_word_keeps_its_space() -> None:
    words = ["\u2581one", "\u2581two", "", "\u2581three"]

    def decode(ids: Any) -> str:
        return "".join(words[i] for i in ids).replace("\u2581", " ").removeprefix(" ")

    spoken = Spoken(SimpleNamespace(decode=decode), [0])  # type: ignore[arg-type]
    assert [spoken.add(token) for token in (1, 2, 2, 3)] == [" two", "", "", " three"]


def test_prompts_come_from_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('one line\n\n  {"prompt": 1}\n')
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a\\nb"}\n' + json.dumps({"messages": TURN, "tools": [1]}) + "\n"
    )
    lines = asked(["x"], str(tmp_path / "p.txt"), chat=False)
    assert [one.said for one in lines] == ["x", "one line", '  {"prompt": 1}']
    assert [one.place.rpartition("/")[2] for one in lines] == ["--prompt", "p.txt:1", "p.txt:3"]
    text, talk = asked([], str(tmp_path / "p.jsonl"), chat=False)
    assert (text.said, talk.said, talk.tools) == ("a\nb", TURN, [1])
    chat = asked(["x"], str(tmp_path / "p.jsonl"), chat=True)
    assert [one.said for one in chat[:2]] == [[{"role": "user", "content": c}] for c in ("x", "a\nb")]
    assert [one.text for one in chat] == ["x", "a\nb", "hi"]


def test_what_the_assistant_says_last_is_left_out_and_told(tmp_path: Path) -> None:
    talk = [*TURN, {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "indeed"}]
    lines = [{"messages": talk}, {"messages": [*talk, TURN[0]]}, {"messages": talk[1:]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    whole, asking = asked([], str(tmp_path / "p.jsonl"), chat=False)
    assert (whole.said, whole.known) == (TURN, "yes\nindeed")
    assert (asking.said, asking.known) == ([*talk, TURN[0]], None)
    (tmp_path / "p.jsonl").write_text(json.dumps(lines[2]))
    with pytest.raises(InputError, match=r"p\.jsonl:1 takes"):
        asked([], str(tmp_path / "p.jsonl"), chat=False)


@pytest.mark.parametrize(
    "name, content, line",
    [
        (
            "p.jsonl",
            "no json\n",
            r'--prompts: .*p.jsonl:1 takes {"prompt": TEXT} or {"messages".*, got no json',
        ),
        ("p.jsonl", '{"prompt": "a"}\n{"messages": []}', r"p.jsonl:2 takes"),
        ("p.jsonl", '{"messages": [{"content": "a"}]}', r"p.jsonl:1 takes"),
        ("p.jsonl", '{"prompt": "a", "messages": [{"role": "user"}]}', r"p.jsonl:1 takes"),
        ("p.txt", "\n \n", r"p.txt holds no prompt; it takes one a line, or JSON lines"),
        ("p.txt", b"\xff", r"cannot read .*p.txt \(it is no UTF-8 text\)"),
        ("p.txt", None, r"p.txt does not exist"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(name: str, content: Any, line: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=line) as refused:
        asked([], str(tmp_path / name), chat=False)
    assert len(refused.value.faults) == 1


def test_a_conversation_goes_in_up_to_where_the_assistant_speaks() -> None:
    tokenizer = HuggingFaceTokenizer(CHAT / "tokenizer.json")
    ids = Asked(TURN, "--prompt").tokens(tokenizer)
    assert (
        tokenizer.decode(ids, special=True)
        == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    whole, _ = tokenizer.chat([*TURN, {"role": "assistant", "content": "yes"}])
    assert whole[: len(ids)] == ids
    with pytest.raises(InputError, match=r"p.jsonl:3: the chat template of .* unknown role judge"):
        Asked([{"role": "judge", "content": ""}], "p.jsonl:3").tokens(tokenizer)
    with pytest.raises(ConfigError, match="bytes has no chat template"):
        Asked(TURN, "--prompt").tokens(ByteTokenizer())


def test_answers_end_with_the_tokens_of_tokenizer_model_and_template(tmp_path: Path) -> None:
    assert ends_of(ByteTokenizer(), tmp_path, chat=False) == [257]
    (tmp_path / "hf").mkdir()
    kept = tmp_path / "hf" / "generation_config.json"
    for written, found in ((7, [257, 7]), ([257, 8, 9], [257, 8, 9]), (None, [257])):
        kept.write_text(json.dumps({"eos_token_id": written}))
        assert ends_of(ByteTokenizer(), tmp_path, chat=False) == found
    kept.write_text("{")
    with pytest.raises(InputError, match=r"generation_config.json: cannot be read as JSON"):
        ends_of(ByteTokenizer(), tmp_path, chat=False)
    # A tokenizer whose documents end otherwise than the assistant's turns.
    other = HuggingFaceTokenizer(CHAT / "tokenizer.json")
    turns_end, other.eos_id = other.eos_id, 0
    assert ends_of(other, tmp_path / "none", chat=False) == [0]
    assert ends_of(other, tmp_path / "none", chat=True) == [0, turns_end]


def test_answers_have_the_room_that_the_models_positions_leave() -> None:
    family = SimpleNamespace(positions_field="n_positions", n_positions=10)
    two = [Asked("a", "--prompt"), Asked("b", "p.txt:2")]
    assert check_room(two, [[1] * 3, [1] * 6], None, 20) == ([20, 20], [])
    assert check_room(two, [[1] * 3, [1] * 6], family, 4) == ([4, 4], [])
    rooms, notes = check_room(two, [[1] * 3, [1] * 6], family, 20)
    assert rooms == [7, 4] and re.search("model.n_positions 10.* after 4 tokens", notes[0])
    with pytest.raises(InputError, match=r"^p.txt:2: has 10 tokens, .* model.n_positions 10; shorten it$"):
        check_room(two, [[1] * 9, [1] * 10], family, 1)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("run")
    config = from_dict(
        {
            "run": {"dir": str(place)},
            "model": {
                "kind": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "intermediate_size": 16, "initializer_range": 0.5, "max_position_embeddings": 64,
            },
            "data": {"kind": "text", "paths": str(place), "tokenizer": str(CHAT)},
            "train": {"global_batch_size": 8, "sequence_length": 32},
        }
    )  # fmt: skip
    made = assemble(config)
    return made, made.trainer.init()


def told(job: Any, capsys: Any, every: list[Asked], **more: Any) -> tuple[str, str]:
    as_json = more.pop("as_json", False)
    wanted = Wanted(12, Sampling(1.0), **more)
    answer(*job, Questions.of(job[0], every, wanted.tokens), wanted, as_json=as_json)
    out, err = capsys.readouterr()
    return out, err


def test_one_answer_streams_and_several_come_whole(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text, talk = Asked("one", "--prompt"), Asked(TURN, "--prompt")
    out, err = told(job, capsys, [text])
    assert out.startswith("one") and out.count("one") >= 1 and out.endswith("\n")
    assert re.fullmatch(r"dsjax: \d+ tokens in \d+\.\d s.*\n", err)
    alone, _ = told(job, capsys, [talk])
    out, _ = told(job, capsys, [talk, text], samples=2)
    pages = dict(re.findall(r"--- (prompt \d, answer \d)\n(.*?)(?=\n--- |\Z)", out, re.S))
    assert sorted(pages) == [f"prompt {p}, answer {s}" for p in (1, 2) for s in (1, 2)]
    assert pages["prompt 1, answer 1"].removesuffix("\n") == f"hi\n{alone}".removesuffix("\n")
    assert all(page.startswith("one" if "prompt 2" in name else "hi\n") for name, page in pages.items())


def test_scripts_get_lines_of_json(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text, talk = Asked("one", "--prompt"), Asked(TURN, "--prompt")
    lines = [json.loads(line) for line in told(job, capsys, [text, talk], as_json=True)[0].splitlines()]
    first, second = sorted(lines, key=lambda line: line["number"])
    assert first["prompt"] == "one" and second["messages"] == TURN
    assert {"number", "sample", "answer", "tokens", "ended"} <= first.keys() & second.keys()
    assert all(line["ended"] == ("length" if line["tokens"] == 12 else "end") for line in lines)
    streamed, _ = told(job, capsys, [text])
    assert streamed == f"one{first['answer']}\n"
