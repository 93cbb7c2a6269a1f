"""The verbs train, eval and generate: a config in, an exit code out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from dsjax.config import Config, dump
from dsjax.data import EvalData, open_eval, open_train
from dsjax.errors import ConfigError, Damaged, InputError
from dsjax.train.answers import Questions, Wanted, answer
from dsjax.train.assemble import Assembled, assemble
from dsjax.train.memory import GIB, bytes_a_device
from dsjax.train.prompts import Asked, asked_of
from dsjax.train.sampling import Sampling
from dsjax.train.state import State
from dsjax.train.summary import compressed_bits, eval_table, show, where_things_lie


def train(config: Config, *, dry_run: bool = False, allow_config_change: bool = False) -> int:
    """Trains, or goes on from the newest checkpoint, and tells how it ended.

    Raises:
      Preempted, Diverged, OutOfDeviceMemory, ConfigError, InputError: as `Trainer.fit`.
    """
    job = assemble(config, allow_config_change=allow_config_change)
    if dry_run:
        return _dry_run(job)
    trainer = job.trainer
    samples = _samples(job)
    data = open_train(config, job.rows)
    sets = _open_eval(job) if config.eval.every else {}
    last: dict[str, Any] = {}
    state = trainer.fit(
        data,
        config.train.steps,
        stop_after=config.train.stop_after,
        eval_loader={name: one.batches for name, one in sets.items()},
        on_eval=lambda step, results: last.update(results),
    )
    if last:
        show(eval_table(last, sets, _compressed(config, sets)))
    if samples is not None:
        # The likeliest tokens are kept to, so that little models make sense.
        wanted = Wanted(config.eval.sample_tokens, Sampling(0.7, 0, 0.9))
        answer(job, state, samples, wanted, timed=False)
    where_things_lie(config, trainer.checkpoints.latest_step())
    return 0


def evaluate(config: Config) -> int:
    """Evaluates the newest checkpoint on each evaluation set and prints a table.

    Raises:
      InputError: there is no checkpoint, or a set cannot be read.
    """
    job = assemble(config)
    sets = _open_eval(job)
    if not sets:
        raise ConfigError("eval: nothing to evaluate; name eval.sets or hold documents out (data.holdout)")
    state = _restored(job)
    results = {name: job.trainer.evaluate(state, one.batches) for name, one in sets.items()}
    show(eval_table(results, sets, _compressed(config, sets), step=int(state.step)))
    return 0


def generate(config: Config, asked: Sequence[Asked], wanted: Wanted, *, as_json: bool = False) -> int:
    """Prints what the newest checkpoint makes of prompts (`answers.answer`).

    Raises:
      ConfigError, InputError: prompts that cannot be answered, or there is no checkpoint.
    """
    job = assemble(config)
    questions = Questions.of(job, asked, wanted.tokens)
    answer(job, _restored(job), questions, wanted, as_json=as_json)
    return 0


def _restored(job: Assembled) -> State:
    """The newest state, if the tokenizer is still the one that it was trained with."""
    state, facts = job.trainer.restore_with_facts()
    trained = (facts.get("loader") or {}).get("tokenizer")
    if trained is not None and trained != job.tokenizer.fingerprint:
        raise InputError(
            f"data.tokenizer: {job.tokenizer.name} is not the tokenizer that {job.config.run.directory} was trained "
            "with; set it to that one's file"
        )
    return state


def _open_eval(job: Assembled) -> Mapping[str, EvalData]:
    config = job.config
    return open_eval(config, job.rows)


def _compressed(config: Config, sets: Mapping[str, EvalData]) -> dict[str, dict[str, float]]:
    """Set -> compressor -> bits per byte, for the compressors that the config names."""
    names = config.eval.compressors
    if not names or jax.process_index() != 0:
        return {}
    return {name: compressed_bits(one.texts(), names) for name, one in sets.items()}


def _samples(job: Assembled) -> Questions | None:
    """The config's prompts, refused before the first step if they cannot be answered."""
    # A run that learns conversations is asked as it is talked to.
    asked = asked_of(job.config.eval.samples, "eval.samples", job.config.data.kind == "chat")
    return Questions.of(job, asked, job.config.eval.sample_tokens) if asked else None


def _dry_run(job: Assembled) -> int:
    """Prints every setting and what this machine would do; compiles and writes nothing."""
    config, trainer = job.config, job.trainer
    trainer.directory.check_resume()
    trainer.program.check_steps(config.train.steps)
    latest = trainer.checkpoints.latest_step()
    if latest is not None:
        with suppress(Damaged):  # training passes it over
            trainer.go_on_with(trainer.program.going_on(trainer.checkpoints.facts(latest)))
    state = trainer.program.abstract_state
    params = sum(
        leaf.size for leaf in jax.tree.leaves(jax.eval_shape(trainer.program.in_order, state.params))
    )
    held = bytes_a_device(state)
    train = config.train
    start = "start" if latest is None else f"resume at step {latest}"
    axes = " x ".join(f"{a} {s}" for a, s in trainer.mesh.shape.items() if s > 1) or "one device"
    device = trainer.mesh.devices.flat[0]
    show(dump(config))
    for line in [
        f"would {start} in {config.run.directory} and train to step {train.steps}",
        f"devices: {trainer.mesh.size} x {device.device_kind} ({device.platform}); mesh: {axes}; "
        f"processes: {jax.process_count()}",
        f"model: {config.model.kind}, {params:,} trainable parameters; state {held / GIB:.3f} GiB a device",
        f"a step: {train.global_batch_size} sequences x {train.sequence_length} tokens in "
        f"{trainer.program.microbatches} microbatch(es); the run: "
        f"{train.steps * train.global_batch_size * train.sequence_length:,} tokens",
        *trainer.notes,
    ]:
        show(f"# {line}")
    return 0
