"""The words of a plan: axes as a config names them, one unit a table, one term for a resource."""

from __future__ import annotations

import dataclasses
import re

import pytest
from plan_runs import MODEL, small

from dsjax.aot import parse_target
from dsjax.config import from_dict
from dsjax.errors import ConfigError, InputError
from dsjax.plan.compiled import check_mesh, vocabulary, vocabulary_notes
from dsjax.plan.estimate import estimate
from dsjax.plan.result import Roofline
from dsjax.plan.show import GIB, MIB, headline, in_one_unit, page, sheets
from dsjax.plan.words import RESOURCES, axes_words, mesh_words


@pytest.fixture(scope="module")
def planned():
    config = small({"fsdp": 4, "tensor": [2, 2]})
    return estimate(config, parse_target("16xH100"), None, None, "for a test")


def test_a_pair_is_written_as_in_a_config(planned):
    assert mesh_words({"fsdp": 2, "tensor": 4, "tensor_rows": 2}) == "fsdp 2 x tensor [4,2]"
    assert mesh_words({"tensor_rows": 2}) == "tensor [1,2]" and mesh_words({"tensor": 4}) == "tensor 4"
    assert mesh_words({}) == "one device"
    pair = {"tensor": 4, "tensor_rows": 2, "fsdp": 2}
    assert axes_words(("tensor",), {"tensor": 8}) == ["tensor"]
    assert axes_words(("fsdp", "tensor"), pair) == ["fsdp", "tensor columns"]
    assert axes_words(("fsdp", "tensor_rows"), pair) == ["fsdp", "tensor rows"]
    assert axes_words(("tensor", "tensor_rows"), pair) == ["tensor"]
    told = page(planned)
    assert "tensor_rows" not in told and "tensor rows" in told and "tensor [2,2]" in headline(planned)
    assert planned.as_dict()["mesh"] == {"fsdp": 4, "tensor": 2, "tensor_rows": 2}
    with pytest.raises(ConfigError) as refused:
        check_mesh(small({"fsdp": 2, "tensor": [4, 2]}), parse_target("8xH100"))
    assert "tensor_rows" not in refused.value.faults[0]


@pytest.mark.parametrize(
    ("sizes", "written"),
    [
        ([23.5 * GIB, 6 * MIB, 0], ["23.50 GiB", "<0.01 GiB", "0"]),
        ([0.477 * GIB, 7 * MIB], ["0.477 GiB", "0.007 GiB"]),
        ([99 * MIB, 2.5 * MIB, 100], ["99.00 MiB", "2.50 MiB", "<0.01 MiB"]),
        ([1000, 3], ["1,000 bytes", "3 bytes"]),
        ([GIB, -2 * GIB], ["1.00 GiB", "-2.00 GiB"]),
    ],
)
def test_a_table_has_one_unit(sizes, written):
    assert [in_one_unit(sizes)(size) for size in sizes] == written


def test_no_table_of_a_plan_mixes_units(planned):
    for sheet in sheets(planned):
        told = " ".join(cell for row in sheet.rows for cell in row)
        assert len(set(re.findall(r"\b(?:GiB|MiB|bytes)\b", told))) <= 1, sheet.title


def test_what_bounds_a_step_has_the_name_of_its_row(planned):
    for name, words in RESOURCES.items():
        slow = dataclasses.replace(planned, roofline=Roofline(**{**dict.fromkeys(RESOURCES, 1.0), name: 2.0}))
        (time,) = [dict(sheet.rows) for sheet in sheets(slow) if sheet.title == "time of a step"]
        assert time["bound by"] == words and f"{words}, at peak" in time


def test_the_memory_bar_has_a_legend(planned):
    told = page(planned)
    legend = re.findall(r'<li><i class="(\w+)"></i>([^<]+)</li>', told)
    drawn = re.findall(r'<span class="(\w+)"', told)
    assert [name for name, _ in legend] == [*drawn, "limit"] and {"parameters", "unused"} <= set(drawn)
    assert all(f".{name} {{ background" in told for name in drawn)
    assert all(re.search(r": <?&?l?t?;?[\d.,]+ (GiB|MiB) \([\d.]+%\)$", words) for _, words in legend), legend
    assert "http" not in told


def test_a_plan_doubts_a_host_of_16(planned):
    assert sum("16xH100: one host of 16" in note for note in planned.notes) == 1


def test_a_vocabulary_that_only_the_data_knows_is_said_to_be_taken():
    data = {"kind": "text", "paths": "nowhere", "tokenizer": "bpe", "bpe_vocab_size": 512}
    model = {name: size for name, size in MODEL.items() if name != "vocab_size"}
    train = {"global_batch_size": 8, "sequence_length": 64}
    guessed = from_dict({"data": data, "model": model, "train": train})
    assert "data.bpe_vocab_size, 512: data.paths was not looked at" in vocabulary_notes(guessed)[0]
    assert vocabulary_notes(from_dict({"data": {**data, "tokenizer": "bytes"}})) == []
    assert vocabulary_notes(small()) == []
    found = estimate(guessed, parse_target("8xH100"), vocabulary(guessed), None, "for a test")
    assert vocabulary_notes(guessed)[0] in found.notes
    with pytest.raises(InputError, match=r"gone\.json does not exist.*model\.vocab_size tells that too"):
        vocabulary(from_dict({"data": {**data, "tokenizer": "gone.json"}}))
