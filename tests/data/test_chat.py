"""Conversations: the template's own text, BOS once, loss on the assistant's tokens and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.data import open_eval, open_train
from dsjax.data.tokenizer import HuggingFaceTokenizer
from dsjax.errors import ConfigError, InputError

BOS, START, END = 0, 1, 2
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "  hey\nyou "},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def load(directory: str | Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(Path(directory) / "tokenizer.json")


@pytest.fixture
def with_template(tmp_path: Path, chat_tokenizer: str) -> Any:
    """The tokenizer with another template."""

    def make(template: str, **settings: Any) -> str:
        directory = tmp_path / "other"
        shutil.copytree(chat_tokenizer, directory)
        file = directory / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template, **settings}))
        return str(directory)

    return make


def marked(tokenizer: HuggingFaceTokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """The runs of tokens that count, as text with special tokens by name."""
    runs: list[list[int]] = []
    for place, token in enumerate(ids):
        if mask[place]:
            if not (place and mask[place - 1]):
                runs.append([])
            runs[-1].append(token)
    return [tokenizer._tokens.decode(run, skip_special_tokens=False) for run in runs]


def test_loss_is_on_the_assistant_with_its_end_token(chat_tokenizer: str) -> None:
    tokenizer = load(chat_tokenizer)
    ids, mask = tokenizer.chat(TALK)
    assert marked(tokenizer, ids, mask) == ["hey\nyou<|im_end|>", "so long<|im_end|>"]
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert tokenizer._tokens.decode(ids, skip_special_tokens=False) == (
        "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhey\nyou<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\nso long<|im_end|>\n"
    )


def test_a_conversation_may_begin_with_the_assistant(chat_tokenizer: str) -> None:
    tokenizer = load(chat_tokenizer)
    ids, mask = tokenizer.chat(TALK[1:3])
    assert marked(tokenizer, ids, mask) == ["hey\nyou<|im_end|>"] and ids.count(BOS) == 1


def test_tools_reach_the_template(chat_tokenizer: str) -> None:
    tokenizer = load(chat_tokenizer)
    ids, _ = tokenizer.chat(TALK, [{"name": "añadir"}])
    assert '[{"name": "añadir"}]' in tokenizer.decode(ids)


def test_a_template_without_bos_still_gives_one(with_template: Any) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = load(
        with_template(plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    )
    ids, mask = tokenizer.chat(TALK[:2])
    assert ids[:2] == [BOS, START] and ids.count(BOS) == 1
    assert marked(tokenizer, ids, mask) == ["  hey\nyou <|im_end|>"]


def test_generation_blocks_say_what_is_the_assistants(with_template: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}U:{{ m.content }}{% endif %};{% endfor %}{{ messages | length }}"
    )
    tokenizer = load(with_template(template))
    ids, mask = tokenizer.chat(TALK)
    assert marked(tokenizer, ids, mask) == ["  hey\nyou <|im_end|>", "so long<|im_end|>"]
    assert tokenizer.decode(ids).startswith("U:hi;A:  hey") and tokenizer.decode(ids).endswith("so long;4")


def test_reasoning_that_later_turns_drop(with_template: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load(with_template(template))
    ids, mask = tokenizer.chat(TALK)
    assert marked(tokenizer, ids, mask) == [
        "  hey\nyou <|im_end|>",
        "<think>\n\n</think>\n\nso long<|im_end|>",
    ]


def test_an_answer_without_an_end_token_gets_one(with_template: Any) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
    tokenizer = load(with_template(template + "{% if add_generation_prompt %}a:{% endif %}"))
    ids, mask = tokenizer.chat(TALK[2:])
    assert marked(tokenizer, ids, mask) == ["so long<|im_end|>"] and ids[-1] == END


def test_a_template_that_rewrites_what_was_said_is_refused(with_template: Any) -> None:
    tokenizer = load(
        with_template("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    with pytest.raises(InputError, match=r"turn 2.*generation"):
        tokenizer.chat(TALK)


def test_templates_cannot_reach_out(with_template: Any) -> None:
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{% include '/etc/passwd' %}",
    ):
        directory = with_template(template)
        with pytest.raises(InputError, match="refuses it"):
            load(directory).chat(TALK)
        shutil.rmtree(directory)


def test_batches_of_conversations(settings: Any, write_lines: Any, chat_tokenizer: str) -> None:
    talks = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}!"}]}
             for n in range(5)]  # fmt: skip
    path = write_lines("talk.jsonl", [*talks, {"messages": [{"role": "user", "content": "alone"}]}])
    config = settings(
        {"kind": "chat", "paths": path, "tokenizer": chat_tokenizer, "holdout": 0.0}, sequence_length=48
    )
    data = open_train(config, np.arange(4))
    rows = [data.sources[0].row(number) for number in range(data.rows_per_epoch)]
    said = [data.tokenizer.decode(row["targets"][row["weights"] > 0].tolist()) for row in rows]
    assert sorted("".join(said)) == sorted("".join(f"a{n}!" for n in range(5)))
    assert sum(int((row["targets"][row["weights"] > 0] == END).sum()) for row in rows) == 5
    assert any("1 conversation without the assistant skipped" in line for line in data.describe())


@pytest.mark.parametrize("speaker", ["robot", ["human"]])
def test_conversations_as_sharegpt_has_them(
    settings: Any, write_lines: Any, chat_tokenizer: str, speaker: Any
) -> None:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "because"}]
    path = write_lines(
        "talk.jsonl", [{"conversations": talk}, {"conversations": [{"from": speaker, "value": ""}]}]
    )
    data = {
        "kind": "chat",
        "paths": path,
        "tokenizer": chat_tokenizer,
        "holdout": 0.0,
        "field": "conversations",
    }
    with pytest.raises(
        InputError, match=r"talk.jsonl:2: message 1 .*from and value, the former one of human"
    ):
        open_train(settings(data, sequence_length=48), np.arange(1))
    path = write_lines("talk.jsonl", [{"conversations": talk}])
    found = open_train(settings(data, sequence_length=48), np.arange(1))
    row = found.sources[0].row(0)
    assert found.tokenizer.decode(row["targets"][row["weights"] > 0].tolist()) == "because"


@pytest.mark.parametrize("packing", ["pack", "concat", "none"])
def test_rows_without_a_target_are_left_out(
    settings: Any, write_lines: Any, chat_tokenizer: str, packing: str
) -> None:
    talks = [
        {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no"}]},
    ]
    path = write_lines("talk.jsonl", talks)
    data = {"kind": "chat", "paths": path, "tokenizer": chat_tokenizer, "packing": packing, "holdout": 0.0}
    config = settings(data, {"eval": {"sets": {"same": path}}}, sequence_length=64)
    train = open_train(config, np.arange(4))
    for number in range(train.rows_per_epoch):
        assert train.sources[0].row(number)["weights"].sum() > 0
    assert any("without a target left out" in line for line in train.describe())
    same = open_eval(config, np.arange(4))["same"]
    assert sum(float(batch["weights"].sum()) for batch in same.batches()) == same.num_tokens == 4 + 3
    assert same.num_bytes == len("yes") + len("no")


def test_no_assistant_at_all_is_refused(settings: Any, write_lines: Any, chat_tokenizer: str) -> None:
    path = write_lines("talk.jsonl", [{"messages": [{"role": "user", "content": "alone"}]}])
    config = settings({"kind": "chat", "paths": path, "tokenizer": chat_tokenizer})
    with pytest.raises(InputError, match=r"no conversation of .*talk.jsonl has a token of the assistant"):
        open_train(config, np.arange(4))


def test_faults_name_the_conversation(settings: Any, write_lines: Any, chat_tokenizer: str) -> None:
    path = write_lines("talk.jsonl", [{"messages": TALK}, {"messages": [{"role": "robot", "content": "x"}]}])
    config = settings({"kind": "chat", "paths": path, "tokenizer": chat_tokenizer})
    with pytest.raises(InputError, match=r"talk.jsonl:2: the chat template .* unknown role robot"):
        open_train(config, np.arange(4))


def test_chat_needs_a_template(settings: Any, write_lines: Any) -> None:
    path = write_lines("talk.jsonl", [{"messages": TALK}])
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(ConfigError, match=r"data.tokenizer.*no chat template"):
            open_train(settings({"kind": "chat", "paths": path, "tokenizer": tokenizer}), np.arange(4))
