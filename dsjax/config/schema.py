"""Every setting of a run: its name, type, default and one line of what it means.

The models here hold values that have already been parsed and typed (`dsjax.config.load`); what
one section alone can check stands in its validators, what needs several sections in
`Config.check_together`.  The description of each field is the config reference's text.
"""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dsjax.config.checkpoint import CheckpointConfig
from dsjax.config.exchange import DilocoConfig, GradSyncConfig
from dsjax.config.fields import (
    BelowOne,
    Fraction,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PathList,
    PatternList,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Takes,
    described,
    fits_an_int,
    not_zero,
    one_or_many,
)
from dsjax.config.lora import LoraConfig
from dsjax.config.parallel import MeshConfig, PipelineConfig
from dsjax.config.precision import PrecisionConfig, StabilityConfig
from dsjax.errors import DsjaxError
from dsjax.hf.hub import local


class RunConfig(Section):
    """Which run this is, where it lives and how it starts."""

    name: Annotated[
        str,
        Field(pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$"),
        Takes("a name that can be a folder's, without /"),
    ] = described("run", "Name of the run; part of the default directory.")
    dir: NonEmpty | None = described(None, "Directory of the run. Default: runs/NAME.")
    seed: Seed = described(0, "Seed of initialisation, data order and dropout.")
    resume: Literal["auto", "never", "must"] = described(
        "auto",
        "auto: go on from the newest checkpoint if there is one; never: refuse a directory that "
        "has checkpoints; must: refuse one that has none.",
    )
    init_from: str | None = described(
        None,
        "Start with the parameters of another run's directory, or of a saved Hugging Face model (a directory, or "
        "hf://org/name): weights only, step 0.",
    )

    @property
    def directory(self) -> str:
        return self.dir or f"runs/{self.name}"


class RuntimeConfig(Section):
    """What the run runs on."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = described("auto", "Backend to use.")
    cpu_devices: PositiveInt | None = described(
        None, "Simulate this many devices on the CPU (of each process)."
    )
    distributed: Literal["auto", "none"] = described(
        "auto",
        "auto: join the cluster that the environment describes (SLURM, Open MPI, "
        "Kubernetes, dsjax launch); none: run alone whatever the environment says.",
    )
    distributed_timeout: PositiveInt = described(300, "Seconds to wait for the other processes at start.")
    compilation_cache: str | None = described(
        "auto", "Directory of compiled programs; auto: the user's cache directory; null: none."
    )
    xla_preset: Literal["auto", "none"] = described(
        "auto",
        "auto: XLA options measured to be good for this platform, each checked before it "
        "is used, the user's own XLA_FLAGS winning; none: XLA's defaults.",
    )


class ModelConfig(BaseModel):
    """The model: `kind` names a family or `module:function`; the rest are that model's fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    kind: Annotated[
        str,
        Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]*(:[A-Za-z_][A-Za-z0-9_]*)?$"),
        Takes("a family's name, or module:function"),
    ] = described(
        "llama",
        "A family (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3_text, gpt2, olmo2, deepseek_v3), "
        "or module:function of an installed or local module that returns a Flax model, called with the rest of this "
        "section. With config the default is its model_type.",
    )
    config: str | None = described(
        None,
        "A Hugging Face config.json, its directory, or hf://org/name[@revision], to read the size fields from.",
    )

    @model_validator(mode="before")
    @classmethod
    def _kind_of_config(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "kind" in values or not isinstance(values.get("config"), str):
            return values
        # Whoever builds the model says what is wrong with the file.
        with contextlib.suppress(OSError, ValueError, DsjaxError):
            path = local(values["config"], "model.config", "config")
            saved = json.loads(
                ((path / "config.json") if path.is_dir() else path).read_text(encoding="utf-8")
            )
            if isinstance(saved, dict) and isinstance(saved.get("model_type"), str):
                return {**values, "kind": saved["model_type"]}
        return values

    @property
    def fields(self) -> dict[str, Any]:
        """The model's own fields: everything but `kind` and `config`."""
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """How long, how much at a time, and what is recomputed."""

    steps: PositiveInt = described(1000, "Optimizer steps of the whole run.")
    stop_after: PositiveInt | None = described(
        None, "End this call after N more steps as a pre-emption would: saved, exit 75."
    )
    global_batch_size: PositiveInt = described(8, "Sequences (examples) a step over all devices.")
    sequence_length: PositiveInt = described(256, "Tokens of a sequence.")
    gradient_accumulation_steps: PositiveInt = described(
        1, "Microbatches a step; gradients are summed (precision.gradients) and divided once."
    )
    remat: Annotated[
        str,
        Field(pattern=r"^(none|full|dots|every_[1-9][0-9]*)$"),
        Takes("none, full, dots or every_N (every_4, say)"),
    ] = described(
        "none",
        "What the backward pass recomputes: none, full (every layer), dots (all but matrix products; those eight times "
        "as wide as their input too), every_N (keeps one layer's input in N).",
    )
    fsdp_gather: Literal["layer", "step"] = described(
        "layer", "Gather sharded parameters a layer at a time, or all of them once a step."
    )

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} does not divide into "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} microbatches"
            )
        return self


FileKind = Literal["text", "jsonl", "chat", "parquet", "arrayrecord"]


class MixtureSource(Section):
    """One source of a weighted mixture."""

    paths: PathList = Field(description="Files, globs or directories.", min_length=1)
    weight: PositiveFloat = described(1.0, "Share of the rows drawn from this source (kept to within 1%).")
    kind: FileKind | None = described(None, "Kind of this source; default: data.kind.")
    field: NonEmpty | None = described(None, "Field of its records; default: data.field.")
    name: NonEmpty | None = described(None, "Name in reports and example ids; default: its first path.")


class DataConfig(Section):
    """Where examples come from and how rows are made of them."""

    kind: Literal["text", "jsonl", "chat", "parquet", "arrayrecord", "synthetic"] = described(
        "synthetic",
        "What the paths hold: text (a document a file); jsonl, parquet (a document a record, see "
        "field); chat (JSONL conversations, loss on the assistant's tokens only); arrayrecord "
        "(UTF-8 text records, or a directory that data build made). synthetic makes tokens from "
        "the seed, without files.",
    )
    paths: PathList = described(
        [], "Files, globs or directories; stdlib: is the source of this Python's library."
    )
    field: NonEmpty | None = described(
        None,
        "Field of a record that holds the text (default: text) or the conversation (default: messages).",
    )
    mixture: list[MixtureSource] = described([], "Weighted sources, instead of paths.")
    tokenizer: NonEmpty = described(
        "bytes",
        "bytes; bpe (a byte-pair tokenizer trained on the training documents and kept "
        "in data.cache_dir); or a tokenizer.json, its directory, or hf://org/name[@revision].",
    )
    bpe_vocab_size: Annotated[int, Field(ge=258), AfterValidator(fits_an_int)] = described(
        8192, "Vocabulary of the tokenizer trained by bpe, its 256 bytes and two special tokens included."
    )
    packing: Literal["pack", "concat", "none"] = described(
        "pack",
        "pack: whole documents share rows, long ones go on in further rows; concat: documents end "
        "to end, cut into rows wherever they fall; none: one document a row, padded, what does not "
        "fit left out in training (never in evaluation).",
    )
    shuffle: bool = described(True, "Shuffle rows anew each epoch.")
    holdout: BelowOne = described(
        0.01, "Share of the documents held out for evaluation, the same for ever (by content)."
    )
    cache_dir: str | None = described(
        None, "Where tokenised data is kept. Default: the user's cache directory."
    )
    workers: NonNegativeInt = described(2, "Threads that prepare batches ahead of the step.")
    log_examples: bool = described(False, "Write the ids of each step's examples.")

    @model_validator(mode="after")
    def _sources_are_given(self) -> DataConfig:
        if self.paths and self.mixture:
            raise ValueError("give paths or mixture, not both")
        if self.kind != "synthetic":
            if not (self.paths or self.mixture):
                raise ValueError(f"kind {self.kind} needs paths or mixture")
        elif self.paths or any(source.kind is None for source in self.mixture):
            raise ValueError("paths are given but kind is synthetic, which reads no files; set data.kind")
        elif self.tokenizer == "bpe" and not self.mixture:
            raise ValueError("kind synthetic has no documents to train tokenizer bpe on")
        return self


class EvalSet(Section):
    """A named evaluation set."""

    paths: PathList = Field(description="Files, globs or directories.", min_length=1)
    kind: FileKind | None = described(None, "Kind of its files; default: data.kind.")
    field: NonEmpty | None = described(None, "Field of its records; default: data.field.")


def _paths_alone(value: Any) -> Any:
    return {"paths": value} if isinstance(value, (str, list)) else value


def _each_once(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError("one is given twice")
    return values


class EvalConfig(Section):
    """Evaluation on held-out data."""

    every: NonNegativeInt = described(0, "Evaluate every N steps and at the end; 0: never.")
    steps: Annotated[
        int,
        Field(ge=-1),
        AfterValidator(not_zero),
        AfterValidator(fits_an_int),
        Takes("an integer >= 1, or -1 for all"),
    ] = described(-1, "Batches an evaluation; -1: all of the set.")
    sets: Annotated[
        dict[
            NonEmpty,
            Annotated[
                EvalSet,
                BeforeValidator(_paths_alone),
                Takes("a path, a list of paths, or {paths, kind, field}"),
            ],
        ],
        Takes("a mapping of set names to paths, or to {paths, kind, field}"),
    ] = described(
        {},
        "Named evaluation sets beside the held-out slice of data (which is named heldout): name: "
        "paths, or name: {paths, kind, field}.",
    )
    compressors: Annotated[
        list[Literal["gzip", "xz"]],
        BeforeValidator(one_or_many),
        AfterValidator(_each_once),
        Takes("gzip, xz or a list of them, each once"),
    ] = described(
        [],
        "At the end of the run, what each of these (at its highest level) makes of the held-out text "
        "is shown beside the model's bits per byte.",
    )
    samples: Annotated[
        list[NonEmpty], BeforeValidator(one_or_many), Takes("a prompt or a list of prompts")
    ] = described([], "Prompts that the model goes on from at the end of the run.")
    sample_tokens: PositiveInt = described(64, "Tokens to add to each of eval.samples at most.")

    @model_validator(mode="after")
    def _heldout_is_taken(self) -> EvalConfig:
        if "heldout" in self.sets:
            raise ValueError("heldout is the name of the held-out slice itself; give that set another")
        return self


class ScheduleConfig(Section):
    """The learning rate over the steps; each kind begins with a linear warm-up."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = described("cosine", "Shape of the decay.")
    warmup_steps: NonNegativeInt = described(500, "Steps of linear warm-up from 0.")
    decay_steps: PositiveInt | None = described(
        None,
        "Steps of decay: cosine and linear reach the minimum after warm-up plus this many "
        "(default: the rest of the run); wsd decays over the last this many (default: a tenth).",
    )
    min_lr_ratio: Fraction = described(0.1, "Learning rate at the end over its peak.")


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    kind: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = described("adamw", "optax optimizer.")
    learning_rate: NonNegativeFloat = described(3e-4, "Peak learning rate.")
    beta1: BelowOne = described(0.9, "Decay of the first moment (momentum of sgd and muon).")
    beta2: BelowOne = described(0.95, "Decay of the second moment.")
    eps: PositiveFloat = described(1e-8, "Added to the denominator.")
    weight_decay: NonNegativeFloat = described(0.1, "Decoupled decay, on matrices only.")
    max_grad_norm: PositiveFloat | None = described(1.0, "Clip the global gradient norm; null: do not.")
    state_dtype: Literal["float32", "bfloat16", "int8"] = described(
        "float32",
        "Type of the moments. bfloat16: rounded at random; int8: 8 bits in blocks of 128, with dynamic exponents.",
    )
    trainable: PatternList = described(
        [],
        "Path patterns (as in layers/*/kernel) of the parameters to train; empty: all. Frozen "
        "parameters take no optimizer memory.",
    )
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="Learning-rate schedule.")


class WandbConfig(Section):
    """Weights & Biases."""

    project: str | None = described(None, "Project to log to; null: do not log.")
    entity: str | None = described(None, "Team or user.")
    mode: Literal["online", "offline"] = described("online", "offline writes to disk only.")


class ProfileConfig(Section):
    """A trace of some steps for TensorBoard or Perfetto, in the run directory."""

    start: PositiveInt | None = described(None, "First step to trace; null: no trace.")
    steps: PositiveInt = described(3, "Steps to trace.")


class ObserveConfig(Section):
    """What is shown and recorded."""

    log_every: PositiveInt = described(10, "Steps between lines of metrics.jsonl and of progress.")
    progress: Literal["auto", "rich", "plain", "none"] = described(
        "auto", "auto: a live bar on a terminal, plain lines elsewhere."
    )
    tensorboard: bool = described(False, "Also write TensorBoard events (extra: track).")
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Weights & Biases (extra: track).")
    prometheus_port: int | None = Field(
        default=None, ge=1, le=65535, description="Serve metrics to Prometheus on this port."
    )
    profile: ProfileConfig = Field(default_factory=ProfileConfig, description="Trace of some steps.")


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig, description="The run.")
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig, description="Backend and processes.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    mesh: MeshConfig = Field(default_factory=MeshConfig, description="Mesh axes.")
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="Pipeline stages.")
    grad_sync: GradSyncConfig = Field(default_factory=GradSyncConfig, description="Exchange of gradients.")
    diloco: DilocoConfig = Field(default_factory=DilocoConfig, description="Local steps between exchanges.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="Training.")
    data: DataConfig = Field(default_factory=DataConfig, description="Data.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Low-rank adapters.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="Precision.")
    stability: StabilityConfig = Field(default_factory=StabilityConfig, description="Stability.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="Observation.")

    @model_validator(mode="after")
    def check_together(self) -> Config:
        """Check what needs several sections; every fault is a line of the one error raised."""
        faults = []
        schedule, steps = self.optimizer.schedule, self.train.steps
        decay = schedule.decay_steps
        if schedule.kind == "wsd" and decay and schedule.warmup_steps + decay > steps:
            faults.append(
                f"optimizer.schedule: warmup_steps {schedule.warmup_steps} and decay_steps {decay} "
                f"together exceed train.steps {steps}"
            )
        profile = self.observe.profile
        if profile.start is not None and profile.start > steps:
            faults.append(
                f"observe.profile.start {profile.start} is past train.steps {steps}: nothing to trace"
            )
        if self.eval.every and not self.eval.sets and self.data.holdout == 0:
            faults.append(
                "eval.every: nothing to evaluate; name eval.sets or hold documents out (data.holdout)"
            )
        if self.lora.init_from and not self.lora.rank:
            faults.append("lora.init_from: there are no adapters to start with; set lora.rank to theirs")
        if faults:
            raise ValueError("\n".join(faults))
        return self
