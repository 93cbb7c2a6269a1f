"""Pipelined steps of a small Llama, compiled for eight H100s and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax import aot
from dsjax.config import from_dict
from dsjax.pipelining.executor import Work
from dsjax.pipelining.residuals import LayerVjp
from dsjax.plan.compiled import compile_step, describe
from dsjax.plan.cost import Reached
from dsjax.plan.stages import PipelinedStep

LAYERS, HIDDEN, SEQUENCE, ROWS = 4, 128, 256, 2  # rows of a device in a microbatch
MODEL = {
    "kind": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "vocab_size": 512,
}  # fmt: skip
ACTIVATION = ROWS * SEQUENCE * HIDDEN * 2  # bytes of a microbatch's between layers, bf16, not cut


@dataclass(frozen=True)
class Step:
    """A compiled step.

    Attributes:
      inspection: as it is; read: by its schedule.
      kept, crossing: bytes that a layer's forward leaves for its backward, and a backward's halves for one another.
    """

    inspection: aot.Inspection
    read: PipelinedStep
    work: Work
    kept: int
    crossing: int

    def on_stage(self, stage: int) -> aot.Collectives:
        """The collectives of a stage, with their times."""
        return self.read.on_stage(stage).collectives


def compiled(mesh: dict[str, int], pipeline: dict[str, Any], tied: bool = False, **train: Any) -> Step:
    """A step of one pass."""
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1)
    settings = {"steps": 10, "sequence_length": SEQUENCE, "remat": "none", **train}
    settings["global_batch_size"] = (
        ROWS * shards * pipeline["microbatches"] * train.get("gradient_accumulation_steps", 1)
    )
    model = MODEL | {"tie_word_embeddings": tied}
    config = from_dict({"model": model, "mesh": mesh, "pipeline": pipeline, "train": settings})
    target = aot.parse_target("8xH100")
    described = describe(config, target, None)
    with _Watched() as watched:
        inspection = compile_step(described).inspection
    work = described.program.stacking.pipelining.work
    passes = config.train.gradient_accumulation_steps
    step = PipelinedStep(inspection, work, passes, target, Reached())
    return Step(inspection, step, work, _bytes(watched.kept), _bytes(watched.crossing))


class _Watched:
    """Sees the shapes that a layer's two halves pass on while a step is traced."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.crossing: list[Any] = []

    def __enter__(self) -> _Watched:
        self._own = LayerVjp.__init__, LayerVjp.split
        start, split = self._own

        def watched_start(vjp: LayerVjp, *args: Any) -> None:
            start(vjp, *args)
            self.kept = vjp.kept

        def watched_split(vjp: LayerVjp, *args: Any) -> Any:
            self.crossing = split(vjp, *args)
            return self.crossing

        LayerVjp.__init__, LayerVjp.split = watched_start, watched_split  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        LayerVjp.__init__, LayerVjp.split = self._own  # type: ignore[method-assign]


def _bytes(shapes: list[Any]) -> int:
    return sum(s.size * s.dtype.itemsize for s in shapes)
