"""Data: documents from files, tokenised once, packed into rows, served in an order known beforehand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsjax.data.evaluation import EvalData, open_eval
    from dsjax.data.loaders import StepLoader, as_step_loader
    from dsjax.data.show import build, inspect
    from dsjax.data.tokenizer import Tokenizer, load_tokenizer
    from dsjax.data.training import TrainData, open_train

__all__ = [
    "EvalData",
    "StepLoader",
    "Tokenizer",
    "TrainData",
    "as_step_loader",
    "build",
    "inspect",
    "load_tokenizer",
    "open_eval",
    "open_train",
]

_HOMES = {
    "EvalData": "evaluation",
    "open_eval": "evaluation",
    "StepLoader": "loaders",
    "as_step_loader": "loaders",
    "build": "show",
    "inspect": "show",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "TrainData": "training",
    "open_train": "training",
}


def __getattr__(name: str) -> Any:
    # Imported when first used: Grain and tokenizers take most of a second.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
