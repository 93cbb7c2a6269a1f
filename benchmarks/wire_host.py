"""One host's part of wire.py: exchanges and training steps of several codecs in turns, each timed and counted.

    python wire_host.py JOB, with a JSON object: model, cases (settings of grad_sync), rounds, steps (whether
    whole training steps are timed too), cpu_devices, out

The process is one of a cluster.  It writes to out/RANK.json, for each case, what each round took.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from namespaces import DEVICE

from dsjax.backend.platform import setup
from dsjax.backend.xla_options import choose
from dsjax.config import Config, from_dict
from dsjax.config.schema import RuntimeConfig
from dsjax.grad_sync import residual_specs, seed_of
from dsjax.grad_sync.exchange import AXIS
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.train.assemble import program_for
from dsjax.train.program import Program
from dsjax.train.state import State

LENGTH = 16  # tokens of a row; a replica has one row a step


def sent() -> int:
    """Bytes that have left this host over the link."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    counters = dict(line.split(":", 1) for line in lines if ":" in line)
    return int({name.strip(): words for name, words in counters.items()}[DEVICE].split()[8])


def config_of(model: Mapping[str, Any], grad_sync: Mapping[str, Any], replicas: int) -> Config:
    """A model that is whole on every device, all its matrices coded."""
    return from_dict(
        {
            "model": dict(model),
            "mesh": {"data": replicas, "fsdp": 1},
            "train": {"global_batch_size": replicas, "sequence_length": LENGTH},
            "optimizer": {"kind": "sgd"},
            "precision": {"policy": "fp32"},
            "grad_sync": {"dense": [], **grad_sync},
        }
    )


def batch_of(config: Config, rows: int) -> dict[str, np.ndarray]:
    """Rows of tokens of no meaning, this process's."""
    shape = (rows, LENGTH)
    rng = np.random.default_rng(jax.process_index())
    tokens = rng.integers(0, config.model.fields["vocab_size"], (rows, LENGTH + 1), dtype=np.int32)
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32), "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1)),
    }  # fmt: skip


def exchange_of(program: Program) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The program's exchange alone: (gradients [replicas, *shape], residuals, step) -> (their sums, residuals)."""
    exchange, params = program.parts.exchange, program.abstract_state.params
    assert exchange is not None
    layout = inside(program.layout, (AXIS,), params)

    def body(grads: Any, residuals: Any, step: Any) -> Any:
        return exchange(layout, jax.tree.map(lambda g: g[0], grads), residuals, seed_of(step))

    kept = residual_specs(exchange, layout)
    mapped = shard_map_over(layout, body, (P(AXIS), kept, P()), (manual_specs(layout, params), kept))
    return jax.jit(mapped, donate_argnums=1, compiler_options=dict(program.compiler_options))


class Gradients:
    """Normal numbers, other ones on every replica.

    Attributes:
      given: a tree of [replicas, *shape], each replica's on its device.
      exact: their sums, leaf by leaf.
    """

    def __init__(self, program: Program):
        leaves, tree = jax.tree.flatten(program.abstract_state.params)
        mine = {device.id for device in jax.local_devices()}
        local: list[list[np.ndarray]] = [[] for _ in leaves]
        self.exact = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
        for replica, device in enumerate(program.mesh.devices.flat):
            rng = np.random.default_rng(replica)
            for leaf, sums, kept in zip(leaves, self.exact, local, strict=True):
                drawn = rng.standard_normal(leaf.shape, np.float32)
                sums += drawn
                if device.id in mine:
                    kept.append(drawn)
        place = NamedSharding(program.mesh, P(AXIS))
        arrays = [jax.make_array_from_process_local_data(place, np.stack(each)) for each in local]
        self.given = jax.tree.unflatten(tree, arrays)

    def error(self, found: Any) -> float:
        """Relative L2 error of sums."""
        off = whole = 0.0
        for leaf, exact in zip(jax.tree.leaves(found), self.exact, strict=True):
            off += float(np.square(np.asarray(leaf.addressable_data(0)) - exact).sum())
            whole += float(np.square(exact).sum())
        return math.sqrt(off / whole)


@dataclass
class Timed:
    """What one call took: seconds until its answer was here, bytes that left this host."""

    answer: Any
    seconds: float
    bytes: int


def timed(function: Callable[..., Any], *arguments: Any) -> Timed:
    """Calls with all hosts starting together; the bytes count until all are done."""
    multihost_utils.sync_global_devices("begin")
    before, begun = sent(), time.perf_counter()
    answer = jax.block_until_ready(function(*arguments))
    seconds = time.perf_counter() - begun
    multihost_utils.sync_global_devices("end")
    return Timed(answer, seconds, sent() - before)


class Case:
    """A codec and a route, compiled.

    Attributes:
      rounds: what each took.
    """

    def __init__(self, model: Mapping[str, Any], grad_sync: Mapping[str, Any]):
        devices = jax.devices()
        self.config = config_of(model, grad_sync, len(devices))
        self.program, _ = program_for(self.config, devices)
        self.program.compiler_options = choose("cpu", mesh=self.program.mesh.shape).options
        self.exchange, self.count = exchange_of(self.program), jnp.zeros((), jnp.int32)
        self.residuals = jax.tree.map(
            lambda r: jnp.zeros(r.shape, r.dtype, device=r.sharding), self.program.abstract_state.residuals
        )
        self.rounds: list[dict[str, float]] = []

    def prepare(self, grads: Gradients, state: State | None) -> dict[str, Any]:
        """Warms up; what way gradients go and how far the first sums are off.

        Args:
          state: of any of the cases, to train from; None: no steps.
        """
        sums, self.residuals = self.exchange(grads.given, self.residuals, self.count)
        exchange = self.program.parts.exchange
        assert exchange is not None
        facts = {"route": exchange.route.name, "relative_error": grads.error(sums)}
        facts["numbers"] = sum(leaf.size for leaf in grads.exact)
        if state is not None:
            program = self.program
            self.state = replace(jax.tree.map(jnp.copy, state), residuals=self.residuals)
            batch = program.place(batch_of(self.config, jax.local_device_count()))
            self.train, self.given = program.step(batch), (batch, program.votes())
            self._step()
        return facts

    def _step(self) -> Timed:
        done = timed(self.train, replace(self.state, residuals=self.residuals), *self.given)
        self.state = done.answer[0]
        self.residuals = self.state.residuals
        return done

    def round(self, grads: Gradients, steps: bool) -> None:
        """One exchange and, if wanted, one step."""
        done = timed(self.exchange, grads.given, self.residuals, self.count)
        self.residuals = done.answer[1]
        found = {"exchange_seconds": done.seconds, "exchange_bytes": done.bytes}
        del done
        if steps:
            done = self._step()
            found |= {"step_seconds": done.seconds, "step_bytes": done.bytes}
        self.rounds.append(found)


def main() -> int:
    """Do the job, write what it took."""
    job = json.loads(sys.argv[1])
    # Each host has cores of its own, as far as there are enough.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[int(os.environ["DSJAX_PROCESS_ID"]) % len(cores) :: 2])
    setup(RuntimeConfig(platform="cpu", cpu_devices=job["cpu_devices"], compilation_cache=None))
    cases = [Case(job["model"], settings) for settings in job["cases"]]
    grads = Gradients(cases[0].program)
    state = cases[0].program.init(0) if job["steps"] else None
    facts = [case.prepare(grads, state) for case in cases]
    for _ in range(job["rounds"]):
        for case in cases:
            case.round(grads, job["steps"])
    found = [{**told, "rounds": case.rounds} for told, case in zip(facts, cases, strict=True)]
    (Path(job["out"]) / f"{jax.process_index()}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
