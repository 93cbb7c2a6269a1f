"""The command line: each verb loads the config, readies the platform and calls one function.

Nothing heavy is imported before a verb runs, so that ``dsjax --help`` answers at once.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dsjax.cli_checkpoints import app as checkpoints
from dsjax.cli_errors import guarded, leave, report
from dsjax.cli_hf import app as hugging_face
from dsjax.cli_launch import launch
from dsjax.errors import ConfigError

if TYPE_CHECKING:
    from dsjax.aot import Target
    from dsjax.config import Config
    from dsjax.config.schema import RuntimeConfig

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\-]*=")

ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A config file; docs/config.md lists every key.")
]
More = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MORE.yaml|key=value",
        help="Files that override CONFIG, a later one an earlier one, and settings that override all "
        "files (train.steps=500, say).",
        show_default=False,
    ),
]

app = typer.Typer(
    name="dsjax",
    help="Train any Flax model sharded over a mesh of named axes, on a laptop or on many hosts.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data = typer.Typer(no_args_is_help=True, help="Tokenise data; look at what the model will see.")
app.add_typer(data, name="data")
app.command(name="launch", context_settings={"allow_interspersed_args": False})(launch)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(hugging_face, name="hf")


def run() -> NoReturn:
    """The command `dsjax`: `main`, and what ends the process."""
    try:
        main()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `argv` (default: sys.argv's).

    Raises:
      SystemExit: with the exit code.
    """
    try:
        code = app(args=argv, prog_name="dsjax", standalone_mode=False)
    except Exception as error:
        code = report(error)
    sys.exit(code or 0)


def _verb(function: Callable[..., int | None]) -> Callable[..., int]:
    """`function` as a verb: what it raises becomes plain lines, what it returns the exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> int:
        return guarded(lambda: function(*args, **kwargs))

    return run


def _settings(first: str, more: Sequence[str] | None) -> Config:
    """The config that a verb's positional arguments, files and overrides in any order, describe."""
    from dsjax.config import load

    words = [first, *(more or ())]
    files = [word for word in words if not _OVERRIDE.match(word)]
    if not files:
        raise ConfigError(f"no config file is given (configs/quickstart.yaml, say), only {' '.join(words)}")
    return load(files, [word for word in words if _OVERRIDE.match(word)])


def _ready(first: str, more: Sequence[str] | None) -> Config:
    """The same, with the backend chosen and the cluster joined, which must come before jax starts."""
    config = _settings(first, more)
    from dsjax.backend.platform import setup

    setup(config.runtime)
    return config


def _elsewhere(runtime: RuntimeConfig, on: str, chips: str | None, traced_here: bool = False) -> Target:
    """The cluster of a name, with jax started on the CPU: no device is touched.

    Args:
      traced_here: what cannot be compiled for the cluster will be traced over as many simulated devices.
    """
    from dsjax.aot import load_chips, missing_for, parse_target
    from dsjax.backend.platform import setup

    target = parse_target(on, load_chips(chips))
    here = target.chip.kind == "cpu" or (traced_here and missing_for(target.chip.kind))
    simulated = target.size if here else None
    settings = {"platform": "cpu", "distributed": "none", "cpu_devices": simulated}
    setup(runtime.model_copy(update=settings))
    return target


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"dsjax {version('dsjax')}")
        except PackageNotFoundError:
            print("dsjax (not installed: run from its source)")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
@_verb
def train(
    config: ConfigFile,
    more: More = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every setting and what this machine would do, and stop.")
    ] = False,
    allow_config_change: Annotated[
        bool,
        typer.Option(
            "--allow-config-change", help="Resume although settings differ from the run's own; recorded."
        ),
    ] = False,
) -> int | None:
    """Train, or go on from the newest checkpoint of the run."""
    resolved = _ready(config, more)
    from dsjax.train.run import train

    return train(resolved, dry_run=dry_run, allow_config_change=allow_config_change)


@app.command(name="eval")
@_verb
def evaluate(config: ConfigFile, more: More = None) -> int | None:
    """Token-weighted loss and perplexity of the newest checkpoint on each evaluation set."""
    resolved = _ready(config, more)
    from dsjax.train.run import evaluate

    return evaluate(resolved)


@app.command()
@_verb
def generate(
    config: ConfigFile,
    more: More = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to go on from; may be given several times.", show_default=False),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="One prompt a line, or JSON lines (.jsonl) with prompt or messages.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Prompts are said to an assistant, by the tokenizer's chat template."),
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the K likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that together have this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the draws.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers that are computed together.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print an answer as a line of JSON.")] = False,
) -> int | None:
    """Sample from the newest checkpoint of a run."""
    if not prompt and prompts is None:
        raise ConfigError(
            "--prompt: is missing; give a text to go on from, or a file of them (--prompts FILE)"
        )
    if not 0 < top_p <= 1:
        raise ConfigError(
            f"--top-p: takes a number > 0 and <= 1, got {top_p:g}; --temperature 0 takes the likeliest token each time"
        )
    resolved = _ready(config, more)
    from dsjax.train.answers import Wanted
    from dsjax.train.prompts import asked
    from dsjax.train.run import generate
    from dsjax.train.sampling import Sampling

    wanted = Wanted(max_tokens, Sampling(temperature, top_k, top_p), seed, samples, batch_size)
    return generate(resolved, asked(prompt or [], prompts, chat), wanted, as_json=as_json)


@app.command()
@_verb
def plan(
    config: ConfigFile,
    on: Annotated[
        str,
        typer.Option(
            help="The cluster: 8xH100, 16x8xH100 (hosts x devices x chip), v5p:2x2x2, cpu:8.",
            show_default=False,
        ),
    ],
    more: More = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens to train on, for days and money (1e12, say). Default: the run's own.",
            show_default=False,
        ),
    ] = None,
    chips: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A YAML file of further chips, links or prices.", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the plan as JSON.", show_default=False),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the plan as a page.", show_default=False),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show too what the step is made of, what could be fused and what XLA fuses."
        ),
    ] = False,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule",
            help="Draw the pipeline's schedule; --schedule FILE.svg: the picture goes there, else beside --html.",
        ),
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Find the fastest layout that fits, and say why.")
    ] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="FILE", help="Write the config that --search finds.", show_default=False
        ),
    ] = None,
) -> int | None:
    """Compile a run's step for a cluster that is not here: will it fit, and what will it cost."""
    pictures = [arg for arg in more or [] if schedule and arg.endswith(".svg") and "=" not in arg]
    if len(pictures) > 1:
        raise ConfigError(f"--schedule: takes one file, got {' and '.join(pictures)}")
    resolved = _settings(config, [arg for arg in more or [] if arg not in pictures])
    if tokens is not None and not 0 < tokens < float("inf"):
        raise ConfigError(f"--tokens: takes a number above 0, got {tokens:g}")
    if config_file is not None and not search:
        raise ConfigError("--write: writes the config that --search finds; add --search")
    if (explain or schedule) and search:
        raise ConfigError(
            f"{'--explain' if explain else '--schedule'}: is of one plan; search first, then give it the config that "
            "--write wrote"
        )
    target = _elsewhere(resolved.runtime, on, chips, traced_here=explain)
    from dsjax.plan.command import plan_command, require_writable, search_command

    files: dict[str, Path | None] = {"json_file": json_file, "html_file": html_file}
    svg_file = Path(pictures[0]) if pictures else None
    require_writable([json_file, html_file, config_file, svg_file])
    if search:
        return search_command(resolved, target, tokens=tokens, config_file=config_file, **files)
    return plan_command(
        resolved, target, tokens=tokens, explain=explain, schedule=schedule, svg_file=svg_file, **files
    )


@app.command()
@_verb
def init(
    model: Annotated[
        str,
        typer.Option(
            help="llama3-8b, llama3-70b, llama3-405b, llama3.2-1b, or a config.json.", show_default=False
        ),
    ],
    on: Annotated[str, typer.Option(help="The cluster, as in plan: 2x8xH100.", show_default=False)],
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to. Default: MODEL-CLUSTER.yaml.", show_default=False),
    ] = None,
) -> int | None:
    """Write a starting config for a model and a cluster, by size alone."""
    from dsjax.config.schema import RuntimeConfig

    target = _elsewhere(RuntimeConfig(), on, None)
    from dsjax.plan.command import init_command

    return init_command(model, target, write)


@data.command(name="build")
@_verb
def data_build(config: ConfigFile, more: More = None) -> int | None:
    """Tokenise the config's data ahead of training; interrupted, it goes on where it stopped."""
    resolved = _ready(config, more)
    from dsjax.data import build

    return build(resolved)


@data.command(name="inspect")
@_verb
def data_inspect(
    config: ConfigFile,
    more: More = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 2,
    step: Annotated[int, typer.Option(min=0, help="The step whose batch is shown.")] = 0,
) -> int | None:
    """Show rows as the model will see them: text, segments, targets and weights."""
    resolved = _ready(config, more)
    from dsjax.data import inspect

    return inspect(resolved, rows=rows, step=step)


@app.command()
@_verb
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> int | None:
    """Versions, devices, links, flags, disk: what will and will not work on this machine."""
    from dsjax.doctor import doctor

    return doctor(as_json=as_json)
