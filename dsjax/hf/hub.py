"""Where a saved model's files are: a directory, or a model of the Hub, which is fetched into its own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from dsjax.errors import ConfigError, InputError

SCHEME = "hf://"
KEPT = "hf"
"""Where a run's directory keeps what stood beside the weights that it began with."""
What = Literal["config", "tokenizer", "weights", "adapter"]
SETTINGS = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
_WANTED: Mapping[What, Sequence[str]] = {
    "config": SETTINGS,
    "tokenizer": TOKENIZER,
    "weights": (*SETTINGS, *TOKENIZER, *WEIGHTS),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
}


def is_saved_model(source: str | Path) -> bool:
    """Whether this names a saved model of Hugging Face's, not a run of ours."""
    return str(source).startswith(SCHEME) or (Path(source).expanduser() / "config.json").is_file()


def local(source: str | Path, key: str, what: What) -> Path:
    """The path here of what a setting names.

    Of a run's directory configs and tokenizers are those that it keeps of the model that it began with. Of
    `hf://org/name` or `hf://org/name@revision` what is asked for is fetched, unless it was before; huggingface_hub
    keeps it, and fetches nothing where HF_HUB_OFFLINE=1.

    Args:
      key: the setting, for messages.
      what: which files are needed.

    Raises:
      ConfigError: it is no name of the Hub's, or huggingface_hub is not installed.
      InputError: it cannot be fetched.
    """
    source = str(source)
    if not source.startswith(SCHEME):
        path = Path(source).expanduser()
        kept = what in ("config", "tokenizer") and not any((path / name).is_file() for name in _WANTED[what])
        return path / KEPT if kept and (path / KEPT).is_dir() else path
    name, _, revision = source.removeprefix(SCHEME).partition("@")
    if not all(part.strip(".") for part in name.split("/")) or name.count("/") > 1:
        raise ConfigError(f"{key}: takes hf://org/name or hf://org/name@revision, got {source}")
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"{key}: {source} needs huggingface_hub; pip install 'dsjax[hub]', or give a directory"
        ) from None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision or None, allow_patterns=list(_WANTED[what])
            )
        )
    except Exception as error:  # of several libraries, for one reason: it is not here and cannot be had
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"{key}: {source} is not in the cache and cannot be fetched ({reason}); check the name and the connection, "
            "or set HF_TOKEN where a model asks for consent"
        ) from None
