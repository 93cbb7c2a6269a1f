"""The verbs under `dsjax hf`: a saved model of Hugging Face's into a run, a run out of it, and both compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsjax.checkpoint import DiskCheckpoints
from dsjax.config import Config, load
from dsjax.config.schema import MeshConfig, ModelConfig
from dsjax.data.tokenizer import TOKENIZER_FILE, HuggingFaceTokenizer, load_tokenizer
from dsjax.errors import ConfigError, InputError
from dsjax.hf.hub import KEPT, SETTINGS, is_saved_model, local
from dsjax.hf.peft import Adapters
from dsjax.hf.peft import save as save_adapters
from dsjax.hf.save import DTYPES, Side, save
from dsjax.hf.tensors import Tensors
from dsjax.mesh import named_leaves
from dsjax.models import FAMILIES, ModelSpec, build
from dsjax.models.adapters import A, B, merged, split_of
from dsjax.models.families import FamilyConfig
from dsjax.models.weights import Box, Get, WeightMap
from dsjax.observe.logs import EventLog
from dsjax.train.assemble import program_for
from dsjax.train.program import Program
from dsjax.train.resume import fresh_state
from dsjax.train.rundir import RunDirectory

# Tokens whose logits are compared; difference of logits that rounding in fp32 makes, for logits of size 1.
_COMPARED, _TOLERANCE = 64, 1e-4


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, and nothing elsewhere; what is given is to be called after each of `total`."""
    columns = TextColumn("{task.description}"), *Progress.get_default_columns()[1:2]
    console = Console(stderr=True)
    with Progress(
        *columns, MofNCompleteColumn(), TimeRemainingColumn(), transient=True, console=console,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def model_type(directory: Path, key: str) -> str:
    """The family of a saved model.

    Raises:
      InputError: no config.json; ConfigError: a family that is not known.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        kind = config["model_type"]
    except OSError:
        raise InputError(f"{key}: {directory} holds no config.json") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{key}: {directory / 'config.json'} names no model_type ({error!r})") from None
    if kind not in FAMILIES:
        raise ConfigError(f"{key}: {directory} is a {kind}; families that are known: {', '.join(FAMILIES)}")
    return kind


# ---- import ----------------------------------------------------------------------------------------


def import_model(source: str, run: str, words: Sequence[str]) -> int:
    """Makes a run whose only checkpoint, of step 0, has a saved model's weights.

    Raises:
      ConfigError, InputError: what cannot be read or is not the model that its config says.
    """
    directory = local(source, "hf import", "weights")
    kind = model_type(directory, "hf import")
    if (Path(run) / "config.yaml").exists():
        raise InputError(f"hf import: {run} is a run already; give a directory that is not there yet")
    tokenizer = source if (directory / TOKENIZER_FILE).is_file() else "bytes"
    # Without moments the checkpoint is as large as the weights.
    settings = [
        f"run.dir={run}", f"run.init_from={source}", f"model.kind={kind}", f"model.config={source}",
        "data.kind=synthetic", f"data.tokenizer={tokenizer}", "optimizer.kind=sgd", "optimizer.beta1=0",
        "precision.policy=fp32", *_undropped(kind),
    ]  # fmt: skip
    family = build(load([], [*settings, *words]).model, platform="cpu").family
    length = min(1024, getattr(family, family.positions_field))
    config = load([], [*settings, f"train.sequence_length={length}", *words])
    program, _ = _laid_out(config, jax.devices())
    state = fresh_state(program, config)
    where, events = RunDirectory(config.run.directory, config), EventLog(Path(config.run.directory))
    where.begin(events, 0, [])
    events.event("imported", 0, source=source)
    store = DiskCheckpoints(config.checkpoint.disk.directory(config.run.directory), config.checkpoint.disk)
    store.save(0, state, {"step": 0, "time": time.time(), "config": where.settings, **program.facts()})
    store.close()
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"{kind}, {numbers:,} numbers (with padding): {store.directory / '0'}")
    print(f"train from it with run.init_from={run}")
    return 0


def _undropped(kind: str) -> list[str]:
    """Settings without dropout of attention weights, of which a model that is not trained makes no use."""
    names = ("attention_dropout", "attn_pdrop")
    return [f"model.{name}=0" for name in names if name in FAMILIES[kind].model_fields]


def _laid_out(config: Config, devices: Sequence[jax.Device]) -> tuple[Program, ModelSpec]:
    """A run's program on the devices here; its tokenizer is asked only where nothing else tells the vocabulary."""
    known = config.model.config is not None or "vocab_size" in config.model.fields
    return program_for(config, devices, None if known else load_tokenizer(config).vocab_size)


# ---- export ----------------------------------------------------------------------------------------


def export_run(
    run: str, directory: str, step: int | None, dtype: str | None, shard_bytes: int, adapter: bool = False
) -> int:
    """Writes a run's checkpoint as a saved model, adapters merged into its matrices.

    Args:
      adapter: write the adapters alone, as the PEFT library does.
      step: of the checkpoint; None: the newest.
      dtype: of the tensors; None: that of the model that the run began with, or of its parameters.

    Raises:
      ConfigError, InputError: a run without a family's model or a checkpoint, or a directory that is not empty.
    """
    file = Path(run) / "config.yaml"
    if not file.is_file():
        raise InputError(f"hf export: {run} is no run's directory (no config.yaml); give the one of run.dir")
    stored = load([file], environ={})
    alone = MeshConfig(**dict.fromkeys(MeshConfig.model_fields, 1))
    config = stored.model_copy(update={"mesh": alone, "run": stored.run.model_copy(update={"dir": run})})
    program, model = _laid_out(config, jax.devices()[:1])
    family = model.family
    if family is None:
        raise ConfigError(f"hf export: model.kind {config.model.kind} is no family of Hugging Face's")
    if family.unsaved():
        raise ConfigError(family.unsaved())
    store = DiskCheckpoints(config.checkpoint.disk.directory(run), config.checkpoint.disk)
    leaves, weights = _parameters(program, store, step), family.weights()
    if adapter:
        return _export_adapters(Path(directory), stored, leaves, weights, dtype or "float32")
    get, side = (
        _merged(leaves, stored.lora.scale if stored.lora.rank else 0.0),
        _side(config, family, Path(run)),
    )
    known = str(side.config.get("dtype") or side.config.get("torch_dtype"))
    dtype = dtype or (known if known in DTYPES else stored.precision.params)
    settings = {**side.config, "dtype" if "dtype" in side.config else "torch_dtype": dtype}
    with _progress("writing", len(weights.tensors)) as advance:
        written = save(
            Path(directory), weights, get, replace(side, config=settings), dtype=dtype, shard_bytes=shard_bytes,
            exact=family.exact_tensors,
            on_tensor=advance,
        )  # fmt: skip
    size = sum(one.stat().st_size for one in written)
    print(
        f"{len(weights.tensors)} tensors of {dtype}, {size / 2**20:,.1f} MiB in {len(written)} files: {directory}"
    )
    if not any(one.name == TOKENIZER_FILE for one in side.files):
        print(f"without a tokenizer: the run's is {config.data.tokenizer}")
    return 0


def _parameters(program: Program, store: DiskCheckpoints, step: int | None) -> dict[str, np.ndarray]:
    """A checkpoint's parameters by path, layers in order."""
    step = store.latest_step() if step is None else step
    if step is None:
        raise InputError(f"hf export: {store.directory} holds no checkpoint")
    state = program.abstract_state
    parts = {"params": state.params, "model_state": state.model_state}
    like, back = program.held(
        store.facts(step), {n: part for n, part in parts.items() if jax.tree.leaves(part)}
    )
    parts = back(store.restore_part(step, like))
    return {name: np.asarray(leaf) for part in parts.values() for name, leaf in named_leaves(part).items()
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}  # fmt: skip


def _merged(leaves: Mapping[str, np.ndarray], scale: float) -> Get:
    """Reads boxes of parameters, kernels with what adapters add to them, in fp32."""

    def get(path: str, box: Box) -> np.ndarray:
        cut = tuple(slice(*span) for span in box)
        whole, layer = leaves[path], path.removesuffix("/kernel")
        if f"{layer}/{A}" not in leaves:
            return whole[cut]
        a, b = leaves[f"{layer}/{A}"], leaves[f"{layer}/{B}"]
        stack, inputs = split_of(whole, a, b)
        lead, into, out = cut[:stack], cut[stack : stack + inputs], cut[stack + inputs :]
        return merged(whole[cut].astype(np.float32), a[(*lead, *into)], b[(*lead, slice(None), *out)], scale)

    return get


def _export_adapters(
    directory: Path, config: Config, leaves: Mapping[str, np.ndarray], weights: WeightMap, dtype: str
) -> int:
    """Writes a run's adapters as PEFT does, in a type.

    Raises:
      ConfigError: there are none, or more than they was trained.
    """
    if not config.lora.rank:
        raise ConfigError("hf export: --adapter: the run has no adapters (lora.rank is 0); leave it out")
    if config.optimizer.trainable:
        raise ConfigError(
            f"hf export: --adapter writes adapters alone, and {', '.join(config.optimizer.trainable)} trained as well "
            "(optimizer.trainable); leave it out, which merges them"
        )
    adapters = Adapters(weights, {path: leaf.shape for path, leaf in leaves.items()})
    adapters.refuse_of_experts()
    base = config.run.init_from
    named = base if base is not None and is_saved_model(base) else None
    settings = adapters.settings(config.lora, named)
    count = save_adapters(directory, adapters, _merged(leaves, 0.0), settings, dtype)
    print(f"{count} tensors of {dtype}, adapters of rank {config.lora.rank}: {directory}")
    if named is None:
        print(f"they belong to what the run began with ({base or 'random weights'}), which is no saved model")
    return 0


def _side(config: Config, family: FamilyConfig, run: Path) -> Side:
    """What stands beside the weights: as the run was given it, changed where its settings are others."""
    kept = Side.of(run / KEPT) if (run / KEPT).is_dir() else Side({})
    if kept.files:
        return Side(family.saved_config(kept.config), kept.files)
    tokenizer = load_tokenizer(config)
    files = Side.of(tokenizer.file.parent).files if isinstance(tokenizer, HuggingFaceTokenizer) else ()
    if kept.config:
        return Side(family.saved_config(kept.config), files)
    # Of a model that was trained from nothing nobody else knows with what its texts begin and end.
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    made = tokenizer.begun() if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    made[SETTINGS[1]] = json.dumps(ids, indent=2).encode()
    return Side({**family.saved_config({}), **ids}, files, made)


# ---- check -----------------------------------------------------------------------------------------


def check_model(source: str) -> int:
    """Compares a saved model's tensors with its config, and its logits with the transformers library's.

    Raises:
      ConfigError, InputError: what cannot be read, or logits that differ.
    """
    directory = local(source, "hf check", "weights")
    model, tensors, vocabulary = _in_memory(directory)
    stored = sorted({str(dtype) for dtype in tensors.dtypes.values()})
    print(f"{len(tensors.shapes)} tensors of {', '.join(stored)}: all that the model needs, and no others")
    for line in _of_ends(directory):
        print(line)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, _COMPARED), dtype=np.int32)
    try:
        theirs = _reference(directory, tokens)
    except ImportError:
        print("logits were not compared: that takes transformers and torch (pip install transformers torch)")
        return 0
    ours = np.asarray(model(jnp.asarray(tokens)))
    off, size = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    print(f"largest difference of logits in float32: {off:.1e} (logits up to {size:.1f})")
    if not off <= _TOLERANCE * max(1.0, size):
        raise InputError(
            f"hf check: logits differ by {off:.1e}; {_TOLERANCE * max(1.0, size):.1e} is what rounding makes"
        )
    return 0


def _of_ends(directory: Path) -> list[str]:
    """What is to be said of the token that ends a text, where config and tokenizer disagree."""
    if not (directory / TOKENIZER_FILE).is_file():
        return []
    end = HuggingFaceTokenizer(directory / TOKENIZER_FILE).eos_id
    told = [Side.of(directory).config]
    generation = directory / SETTINGS[1]
    told += [json.loads(generation.read_text(encoding="utf-8"))] if generation.is_file() else []
    found = [one["eos_token_id"] for one in told if one.get("eos_token_id") is not None]
    known = [number for one in found for number in (one if isinstance(one, list) else [one])]
    if end is None or end in known:
        return []
    said = ", ".join(map(str, known)) or "not set"
    return [
        f"eos_token_id is {said}, and the tokenizer ends a text with {end}: transformers would not stop there"
    ]


def _in_memory(directory: Path) -> tuple[Any, Tensors, int]:
    """The model of a directory on one device, fp32; its tensors; its vocabulary."""
    kind = model_type(directory, "hf check")
    fields = dict.fromkeys((word.partition("=")[0].removeprefix("model.") for word in _undropped(kind)), 0.0)
    spec = build(ModelConfig(kind=kind, config=str(directory), **fields), platform="cpu")
    tensors, weights = Tensors(directory, "hf check"), spec.family.weights()
    names = weights.names(tensors.shapes)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: spec.init(nnx.Rngs(0))))
    with _progress("reading", len(weights.shapes)) as advance:

        def value(path: tuple[Any, ...], leaf: Any) -> Any:
            name = "/".join(map(str, path))
            if name not in weights.shapes:
                return leaf
            advance()
            read = weights.parameter(name, lambda tensor, box: tensors.get(names[tensor], box))
            return leaf.replace(jnp.asarray(read, jnp.float32))

        # Variables that are no parameters (which kind a layer is of) have their values from a real model.
        real = nnx.state(spec.init(nnx.Rngs(0)), nnx.Not(nnx.Param))
        state = nnx.merge_state(abstract, real)
        state = nnx.State.from_flat_path({p: value(p, v) for p, v in state.flat_state()})
    model = nnx.merge(graph, state)
    model.eval()
    return model, tensors, spec.vocab_size or 0


def _reference(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """The transformers library's logits, fp32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return np.asarray(model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy())
