"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, Prometheus."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dsjax.config.schema import ObserveConfig
from dsjax.errors import ConfigError


class Sink(Protocol):
    """Takes the lines of metrics.jsonl as they are written."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Takes one line: of a training step, or of an evaluation."""

    def close(self) -> None:
        """Sends what is left."""


def check_sinks(observe: ObserveConfig) -> None:
    """Refuses trackers whose packages are not installed, before anything is compiled.

    Raises:
      ConfigError: naming the setting and the install command, a line a tracker.
    """
    wanted = {
        "observe.tensorboard": ("tensorboardX", observe.tensorboard),
        "observe.wandb.project": ("wandb", observe.wandb.project is not None),
        "observe.prometheus_port": ("prometheus_client", observe.prometheus_port is not None),
    }
    faults = []
    for setting, (module, on) in wanted.items():
        if not on:
            continue
        try:
            importlib.import_module(module)
        except ImportError:
            faults.append(f"{setting}: needs the package {module}; pip install 'dsjax[track]'")
    if faults:
        raise ConfigError(faults)


def open_sinks(observe: ObserveConfig, run_dir: str | Path, *, enabled: bool = True) -> list[Sink]:
    """The trackers that the settings ask for.

    Args:
      run_dir: the run's directory; TensorBoard and wandb write below it.
      enabled: False opens none (the processes other than 0).

    Raises:
      ConfigError: a package is missing, the port is taken, or wandb cannot log in.
    """
    if not enabled:
        return []
    check_sinks(observe)
    sinks: list[Sink] = []
    if observe.prometheus_port is not None:
        sinks.append(PrometheusSink(observe.prometheus_port))
    if observe.tensorboard:
        sinks.append(TensorBoardSink(Path(run_dir) / "tensorboard"))
    if observe.wandb.project is not None:
        sinks.append(WandbSink(observe, Path(run_dir)))
    return sinks


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a metrics line but its step and time, nested names joined by /."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif (
            isinstance(value, int | float) and math.isfinite(value) and prefix + name not in ("step", "time")
        ):
            yield prefix + name, float(value)


class TensorBoardSink:
    """TensorBoard event files; after a restart, points past the step resumed from are hidden."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: Any = None

    def log(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if self._writer is None:
            import tensorboardX

            self._writer = tensorboardX.SummaryWriter(str(self._directory), purge_step=step)
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, step, walltime=record.get("time"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """One wandb run a run directory, gone on with after a restart."""

    def __init__(self, observe: ObserveConfig, run_dir: Path):
        import wandb

        settings = observe.wandb
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                dir=str(run_dir),
                name=run_dir.name,
                id=_wandb_id(run_dir),
                resume="allow" if settings.mode == "online" else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:
            raise ConfigError(
                f"observe.wandb: cannot start ({str(error).splitlines()[0] if str(error) else error!r}); run "
                "wandb login, or set observe.wandb.mode=offline"
            ) from error
        # Each line carries its own step: wandb's count can only grow, a run may go back.
        self._run.define_metric("*", step_metric="step")
        self._config: Path | None = run_dir / "config.yaml"

    def log(self, record: Mapping[str, Any]) -> None:
        if self._config is not None and self._config.exists():
            import yaml

            self._run.config.update(yaml.safe_load(self._config.read_text()), allow_val_change=True)
            self._config = None
        self._run.log({"step": record["step"], **dict(scalars(record))})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """The run's id at wandb, made once a run directory."""
    path = run_dir / "wandb-id"
    if not path.exists():
        path.write_text(os.urandom(6).hex() + "\n")
    return path.read_text().strip()


class PrometheusSink:
    """Serves the newest metrics as gauges named dsjax_NAME; evaluations carry the label set."""

    def __init__(self, port: int):
        import prometheus_client as prometheus

        self._prometheus = prometheus
        self._registry = prometheus.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus.start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_port: {port} cannot be used ({error.strerror}); choose another port"
            ) from None

    def log(self, record: Mapping[str, Any]) -> None:
        self._set("step", record["step"])
        if "eval" not in record:
            for name, value in scalars(record):
                self._set(name, value)
        for name, result in record.get("eval", {}).items():
            for key, value in scalars(result):
                self._set(f"eval_{key}", value, name)

    def _set(self, name: str, value: float, eval_set: str | None = None) -> None:
        labels = [] if eval_set is None else ["set"]
        if name not in self._gauges:
            metric = "dsjax_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            self._gauges[name] = self._prometheus.Gauge(
                metric, f"{name} of the newest logged step", labels, registry=self._registry
            )
        gauge = self._gauges[name]
        (gauge.labels(eval_set) if eval_set is not None else gauge).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
