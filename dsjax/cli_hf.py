"""The verbs under `dsjax hf`, as they are typed; dsjax.train.hugging_face does them."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from dsjax.cli_errors import on_cpu

app = typer.Typer(no_args_is_help=True, help="Hugging Face models in and out.")

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A saved model's directory, or hf://org/name[@revision].")
]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper())
    if not found:
        raise typer.BadParameter("takes a size as 5GB, 500MB or a number of bytes")
    return max(1, int(float(found[1]) * _UNITS[found[2] or ""]))


@app.command(name="import")
def import_(
    source: Source,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run to make.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)
    ] = None,
) -> int:
    """Make a run whose checkpoint of step 0 has a saved model's weights; train from it by run.init_from."""

    def do() -> int:
        from dsjax.train.hugging_face import import_model

        return import_model(source, run, settings or [])

    return on_cpu(do)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where to write: empty, or not there yet.")],
    step: Annotated[
        int | None, typer.Option(help="Of the checkpoint. Default: the newest.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: as the model came.", show_default=False),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Size of a file of weights.")] = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters alone (lora), as the PEFT library saves them.")
    ] = False,
) -> int:
    """Write a run's weights as safetensors with config.json and tokenizer, as transformers reads them."""

    def do() -> int:
        from dsjax.errors import ConfigError
        from dsjax.hf.save import DTYPES
        from dsjax.train.hugging_face import export_run

        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"--dtype: takes {', '.join(DTYPES)}, got {dtype}")
        return export_run(run, directory, step, dtype, _bytes(shard_size), adapter)

    return on_cpu(do)


@app.command()
def check(source: Source) -> int:
    """Compare a saved model's tensors with its config, and its logits with those of transformers if installed."""

    def do() -> int:
        from dsjax.train.hugging_face import check_model

        return check_model(source)

    return on_cpu(do)
