"""Config files, overrides and environment become one checked Config, or every fault is told."""

from __future__ import annotations

import os
import re

import pytest

from dsjax.config import Config, from_dict, load
from dsjax.errors import ConfigError

QUOTED = "; text that looks like a number or a switch stands in quotes"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files into the current directory and return their relative names."""
    monkeypatch.chdir(tmp_path)

    def _write(name: str, content: str | bytes) -> str:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return _write


def faults(*overrides: str, files=(), environ=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(files, overrides, environ or {})
    assert caught.value.exit_code == 2
    assert all("\n" not in fault for fault in caught.value.faults)
    return caught.value.faults


def test_nothing_given_is_the_default():
    assert load([], [], {}) == Config()


def test_order_of_precedence(write):
    first = write("first.yaml", "train: {steps: 1, sequence_length: 1}\nrun: {seed: 1, name: first}\n")
    second = write("second.yaml", "train:\n  sequence_length: 2\nrun: {seed: 2}\n")
    config = load(
        [first, second], ["run.seed=4"], {"DSJAX_RUN__SEED": "3", "DSJAX_TRAIN__SEQUENCE_LENGTH": "3"}
    )
    assert (config.run.name, config.train.steps) == ("first", 1)
    assert (config.train.sequence_length, config.run.seed) == (3, 4)


def test_environment_is_read_from_the_process(monkeypatch):
    monkeypatch.setenv("DSJAX_OPTIMIZER__SCHEDULE__WARMUP_STEPS", "7")
    monkeypatch.setenv("DSJAX_DEBUG", "1")
    assert load([]).optimizer.schedule.warmup_steps == 7
    assert load([], [], {}).optimizer.schedule.warmup_steps == 500


def test_mappings_merge_and_lists_replace(write):
    first = write("first.yaml", "eval: {sets: {a: x, b: [y]}}\ndata: {kind: text, paths: [p, q]}\n")
    second = write("second.yaml", "eval: {sets: {b: z}}\ndata: {paths: r}\n")
    config = load([first, second], [], {})
    assert {name: one.paths for name, one in config.eval.sets.items()} == {"a": ["x"], "b": ["z"]}
    assert config.data.paths == ["r"]
    assert load([first], ["eval.sets={}"], {}).eval.sets == {}
    assert load([], ["model.rope={a: 1}", "model.rope=null"], {}).model.fields == {"rope": None}


def test_sections_that_hold_nothing_change_nothing(write):
    name = write("empty.yaml", "train:\n  # steps: 3\noptimizer:\n  schedule: {}\nmodel:\n")
    assert load([name], ["train.steps=5", "train="], {}).train.steps == 5
    for content in ("", "# nothing\n", "{}\n", "---\n", "\ufeff"):
        assert load([write("none.yaml", content)], [], {}) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1.", 1.0), (".5", 0.5), ("1E3", 1000.0), ("-.inf", float("-inf")),
        ("12", 12), ("0o17", 15), ("0xff", 255), ("-7", -7), ("012", 12),
        ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
        ("off", "off"), ("no", "no"), ("Yes", "Yes"), ("on", "on"), ("1_000", "1_000"), ("0b11", "0b11"),
        ("12:30:00", "12:30:00"), ("2020-01-01", "2020-01-01"), ("=", "="), ("'5'", "5"), ('"true"', "true"),
        ("e3", "e3"), (".", "."), ("[1, off, 2e0]", [1, "off", 2.0]), ("{a: {b: no}}", {"a": {"b": "no"}}),
        ("!!str 5", "5"), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_values_are_typed_as_yaml_1_2_core(text, value):
    found = load([], [f"model.x={text}"], {}).model.fields["x"]
    assert found == value and type(found) is type(value)


def test_short_names_of_axes_merge_with_full_ones(write):
    name = write("mesh.yaml", "mesh: {dp: 2, tp: 4}\n")
    mesh = load([name], ["mesh.data=3"], {"DSJAX_MESH__CP": "2"}).mesh
    assert (mesh.data, mesh.tensor, mesh.context, mesh.fsdp) == (3, 4, 2, -1)
    assert load([], ["mesh.dp=-1"], {}).mesh.fsdp == 1
    assert faults(files=[write("twice.yaml", "mesh: {dp: 2, data: 2}")]) == [
        "twice.yaml: mesh.data: is given twice, once by its short name"
    ]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("optimizer.learning_rat=3e-4",
         "optimizer.learning_rat: unknown key (got 3e-4); did you mean optimizer.learning_rate?"),
        ("learning_rate=3e-4",
         "learning_rate: unknown key (got 3e-4); did you mean optimizer.learning_rate?"),
        ("optimizer.lr=1", "optimizer.lr: unknown key (got 1); did you mean optimizer.learning_rate?"),
        ("optimiser.kind=sgd", 'optimiser: unknown key (got {"kind": "sgd"}); did you mean optimizer?'),
        ("checkpoint.every=3", "checkpoint.every: unknown key (got 3); did you mean checkpoint.memory.every or "
         "checkpoint.disk.every?"),
        ("run.every=3",
         "run.every: unknown key (got 3); did you mean eval.every, checkpoint.memory.every or checkpoint.disk.every?"),
        ("checkpoint.memory.minutes=1", "checkpoint.memory.minutes: unknown key (got 1); did you mean "
         "checkpoint.remote.every_minutes?"),
        ("checkpoint.xylophone.size=1",
         'checkpoint.xylophone: unknown key (got {"size": 1}); checkpoint takes memory, disk, remote'),
        ("checkpoint.remote.urls=bucket",
         "checkpoint.remote.urls: takes a URL or a list of them (s3://bucket/path, gs://bucket/path, "
         'file:///path), got "bucket"'),
        ("checkpoint.disk.best_metric=loss",
         'checkpoint.disk.best_metric: takes SET.METRIC (heldout.loss, say), got "loss"'),
        ('train.steps="ten"', 'train.steps: takes an integer >= 1, got "ten"'),
        ("train.steps=true", "train.steps: takes an integer >= 1, got true"),
        ("train.steps=1e3", "train.steps: takes an integer >= 1, got 1e3; write 1000"),
        ("train.steps=0", "train.steps: takes an integer >= 1, got 0"),
        ("train.steps=", "train.steps: takes an integer >= 1, got nothing"),
        ("train.steps.more=1", 'train.steps: takes an integer >= 1, got {"more": 1}'),
        ("train=5", "train: takes a section (a mapping of keys), got 5"),
        ("run.dir=5", "run.dir: takes text that is not empty or null, got 5" + QUOTED),
        ("run.name=..", "run.name: takes a name that can be a folder's, without /, got \"..\""),
        ("run.resume=yes", 'run.resume: takes auto, never or must, got "yes"'),
        ("data.shuffle=off", 'data.shuffle: takes true or false, got "off"'),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm: takes a number > 0 or null, got 0"),
        ("optimizer.learning_rate=1e999", "optimizer.learning_rate: takes a number >= 0, got 1e999"),
        ("optimizer.beta1=1.0", "optimizer.beta1: takes a number >= 0 and < 1, got 1.0"),
        ("optimizer.state_dtype=int4", 'optimizer.state_dtype: takes float32, bfloat16 or int8, got "int4"'),
        ("train.remat=every_0",
         'train.remat: takes none, full, dots or every_N (every_4, say), got "every_0"'),
        (
            "mesh.tensor=0",
            "mesh.tensor: takes an integer >= 1, -1 for the rest of the devices, or two of them: "
            "[columns, rows], got 0",
        ),
        (
            "mesh.tensor=[2,-1]",
            "mesh.tensor: takes an integer >= 1, -1 for the rest of the devices, or two of them: "
            "[columns, rows], got [2, -1]",
        ),
        ("mesh.ep=0", "mesh.expert: takes an integer >= 1, or -1 for the rest of the devices, got 0"),
        ("pipeline.layers=[4,0]", "pipeline.layers[1]: takes an integer >= 1, got 0"),
        ("mesh.pp=0",
         "mesh.pipeline: takes an integer >= 1, or -1 for the rest of the devices, got 0"),
        ("mesh.data=-1 mesh.fsdp=-1",
         "mesh: only one axis may be -1 (the rest of the devices), got data and fsdp"),
        ("train.gradient_accumulation_steps=3", 
         "train: global_batch_size 8 does not divide into gradient_accumulation_steps 3 microbatches"),
        ("data.kind=text", "data: kind text needs paths or mixture"),
        ("data.paths=x", "data: paths are given but kind is synthetic, which reads no files; set data.kind"),
        ("data.kind=text data.paths=[a,2]", "data.paths[1]: takes text that is not empty, got 2" + QUOTED),
        ("data.kind=text data.mixture=[{paths:[a],weight:0}]",
         "data.mixture[0].weight: takes a number > 0, got 0"),
        ("data.kind=text data.mixture=[{paths:[a],wieght:1}]",
         "data.mixture[0].wieght: unknown key (got 1); did you mean data.mixture[0].weight?"),
        ("data.kind=text data.mixture=[{weight:1}]",
         "data.mixture[0].paths: is missing; it takes a path or a list of paths"),
        ("eval.sets={a:5}",
         "eval.sets.a: takes a path, a list of paths, or {paths, kind, field}, got 5" + QUOTED),
        ("eval.sets={'':x}", 'eval.sets: a name takes text that is not empty, got ""'),
        ("eval.sets={a:{path:x}}", ["eval.sets.a.paths: is missing; it takes a path or a list of paths",
         'eval.sets.a.path: unknown key (got "x"); did you mean eval.sets.a.paths?']),
        ("eval.sets.heldout=x",
         "eval: heldout is the name of the held-out slice itself; give that set another"),
        ("eval.compressors=gzp", 'eval.compressors[0]: takes gzip or xz, got "gzp"'),
        ("eval.compressors=[xz,xz]",
         'eval.compressors: takes gzip, xz or a list of them, each once, got ["xz", "xz"]'),
        ("train.steps=3000000000", "train.steps: takes an integer >= 1, got 3000000000; no integer above "
         "2147483647 fits"),
        ("mesh.data=99999999999999999999", "mesh.data: takes an integer >= 1, or -1 for the rest of the "
         "devices, got 99999999999999999999; no integer above 2147483647 fits"),
        ("run.seed=4294967296", "run.seed: takes an integer >= 0 and <= 4294967295, got 4294967296"),
        ("model.kind=a-b:c:d", "model.kind: takes a family's name, or module:function, got \"a-b:c:d\""),
        ("eval.every=5 data.holdout=0.0",
         "eval.every: nothing to evaluate; name eval.sets or hold documents out (data.holdout)"),
        ("steps", "steps: an override is written section.key=value"),
        ("a..b=1", "a..b=1: an override is written section.key=value"),
    ],
)  # fmt: skip
def test_each_fault_is_one_line(override, fault):
    overrides = [
        text.replace("{", "{ ").replace(":", ": ") if "=[{" in text or "={" in text else text
        for text in override.split()
    ]
    if "model.kind" in override:
        overrides = [override]
    assert faults(*overrides) == ([fault] if isinstance(fault, str) else fault)


def test_a_key_of_a_later_version_is_unknown():
    assert faults("rewards.kind=fast")[0].startswith(
        'rewards: unknown key (got {"kind": "fast"}); the sections are run, runtime, model,'
    )


def test_all_faults_are_gathered_with_their_places(write):
    name = write("bad.yaml", "train:\n  steps: ten\n  remat: all\noptimizer:\n  lr: 1\nextra:\n  a: 1\n")
    found = faults("run.seed=-1", "nonsense", files=[name], environ={"DSJAX_MESH__TP": "0"})
    assert sorted(re.sub(r": .*(?=\[)|: .*", " ", fault) for fault in found) == [
        "extra [bad.yaml:7]",
        "mesh.tensor [DSJAX_MESH__TP]",
        "nonsense ",
        "optimizer.lr [bad.yaml:5]",
        "run.seed ",
        "train.remat [bad.yaml:3]",
        "train.steps [bad.yaml:2]",
    ]


def test_a_value_that_is_not_yaml_says_how_to_quote_it():
    (fault,) = faults("data.paths=*.txt")
    assert fault.startswith("data.paths: cannot read '*.txt' as a value")
    assert "'data.paths=\"*.txt\"'" in fault
    assert load([], ["data.kind=text", 'data.paths="*.txt"'], {}).data.paths == ["*.txt"]
    (fault,) = faults(environ={"DSJAX_RUN__DIR": "[a"})
    assert fault.startswith("run.dir: cannot read '[a'") and fault.endswith("[DSJAX_RUN__DIR]")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[1, 2]\n", "c.yaml:1: a config is a mapping of sections, got [1, 2]"),
        ("\n\njust words\n", 'c.yaml:3: a config is a mapping of sections, got "just words"'),
        ("run: {seed: 1\n", "c.yaml:2: is not a config in YAML: "),
        ("run:\n\tseed: 1\n", "c.yaml:2: is not a config in YAML: "),
        (
            "run:\n  seed: 1\n  seed: 2\n",
            "c.yaml:3: is not a config in YAML: seed is given twice (also in line 2)",
        ),
        ("a: 1\n---\nb: 2\n", "c.yaml:2: is not a config in YAML: expected a single document"),
        ("a: &a 1\n<<: *a\n", "c.yaml:2: is not a config in YAML: YAML 1.2 has no merge key <<"),
        ("\n? [a]\n: b\n", "c.yaml:2: is not a config in YAML: a key is a name, not a list or a mapping"),
        ("a: *b\n", "c.yaml:1: is not a config in YAML: found undefined alias 'b'"),
        ("a: &a [*a]\n", "c.yaml:1: is not a config in YAML: an alias stands inside the value that it names"),
        (
            "a: &a {b: *a}\n",
            "c.yaml:1: is not a config in YAML: an alias stands inside the value that it names",
        ),
        ('a: "\\ud800"\n', "c.yaml:1: is not a config in YAML: holds half of a surrogate pair"),
        ("a: !!int x\n", 'c.yaml:1: is not a config in YAML: "x" is not of type !!int'),
        ("a: " + "9" * 5000, "c.yaml:1: is not a config in YAML: the number 999"),
        (
            "a: " + "[" * 5000,
            "c.yaml: is not a config in YAML: lists or mappings are nested more than 64 deep",
        ),
        ("a: " + "[" * 70 + "]" * 70, "c.yaml:1: is not a config in YAML: lists or mappings are nested more"),
        ("a: 0x" + "f" * 5000, "c.yaml:1: is not a config in YAML: the number 0xfff"),
        (
            "train.steps: 5\n",
            "train.steps: unknown key (got 5); in a file steps is written inside the section "
            "train [c.yaml:1]",
        ),
        ("run: {seed: 1}\n".encode("utf-16"), "c.yaml:1: is not UTF-8 text (byte 0xff)"),
        ("a: b\nc: \x07\n", "c.yaml:2: is not a config in YAML: character U+0007 is not allowed in YAML"),
        (b"a: b\nc: \xff\n", "c.yaml:2: is not UTF-8 text (byte 0xff)"),
        (b"\x1f\x8b\x08\x00", "c.yaml:1: is not UTF-8 text (byte 0x8b)"),
        (b" " * (5 << 20), "c.yaml: is larger than 4 MiB, which no config is"),
        (
            "a: &a [" + "x, " * 99 + "]\nb: &b [" + "*a, " * 99 + "]\nc: [" + "*b, " * 99 + "]\n",
            "c.yaml:1: is not a config in YAML: holds more than 100000 values",
        ),
    ],
)
def test_a_file_that_is_no_config_is_named_with_its_line(write, content, fault):
    (found,) = faults(files=[write("c.yaml", content)])
    assert found.startswith(fault)


def test_a_flood_of_faults_is_cut(write):
    found = faults(files=[write("c.yaml", "\n".join(f"key{i}: 1" for i in range(50)))])
    assert len(found) == 21 and found[-1] == "and 30 more faults"
    (found,) = faults("model." + "a." * 2000 + "a=1")
    assert found.endswith("has more than 64 parts")


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [made]", "!!python/name:os.mkdir ''", "!custom x",
            "!!binary aGk=", "!!timestamp 2020-01-01", "!!set {a}",
            "!<tag:yaml.org,2002:python/module:os> ''"]
)  # fmt: skip
def test_no_tag_is_followed(write, tag, tmp_path):
    (found,) = faults(files=[write("c.yaml", f"run:\n  name: {tag}\n")])
    assert found.startswith("c.yaml:2: is not a config in YAML: the tag ")
    faults(f"run.name={tag}")
    assert sorted(os.listdir(tmp_path)) == ["c.yaml"]


def test_files_that_cannot_be_opened(write, tmp_path):
    write("quick.yaml", "")
    (tmp_path / "runs").mkdir()
    write("runs/config.yaml", "")
    assert faults(files=["quik.yaml"]) == ["quik.yaml: no such file; did you mean quick.yaml?"]
    assert faults(files=["quick"]) == ["quick: no such file; did you mean quick.yaml?"]
    assert faults(files=["nowhere/at/all.yaml"]) == ["nowhere/at/all.yaml: no such file"]
    assert faults(files=["train.steps"]) == [
        "train.steps: no such file; an override is written train.steps=value"
    ]
    assert load(["runs"]).run.directory == "runs"
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text("{}")
    said = "; it is a saved model: dsjax hf import saved RUN makes a run of it"
    assert faults(files=["saved"]) == [f"saved: is a directory without a config.yaml{said}"]
    assert faults(files=["a\0b"]) == ["a\\x00b: cannot be read (embedded null byte)"]
    # What a missing file would have set is not also called missing.
    assert faults("data.kind=text", files=["gone.yaml"]) == ["gone.yaml: no such file"]


def test_from_dict_reports_as_load_does():
    config = from_dict({"mesh": {"dp": 2}, "model": {"kind": "a:b", "size": {"x": 1}}, "train": {}})
    assert (config.mesh.data, config.model.fields) == (2, {"size": {"x": 1}})
    with pytest.raises(ConfigError, match=r"train.stepz: unknown key \(got 3\); did you mean train.steps\?"):
        from_dict({"train": {"stepz": 3}})
