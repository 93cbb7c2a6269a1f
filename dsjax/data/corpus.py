"""All that a config reads: its sources, tokenised, split into what is trained on and what is held out."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from dsjax.config import Config
from dsjax.data import cache
from dsjax.data.holdout import held_out
from dsjax.data.prepare import prepared
from dsjax.data.sources import Source, training_sources
from dsjax.data.store import Store
from dsjax.data.tokenizer import Tokenizer
from dsjax.errors import InputError


@dataclass
class Corpus:
    """The training sources of a config.

    Attributes:
      stores: one a source, in the config's order.
      held: for each store, which documents are held out: bool [N].
    """

    sources: list[Source]
    stores: list[Store]
    held: list[np.ndarray]

    @property
    def fingerprint(self) -> str:
        """Tells corpora apart by their tokens, not by where they lie."""
        return cache.key([store.manifest["digest"] for store in self.stores])


def open_corpus(config: Config, tokenizer: Tokenizer) -> Corpus:
    """Opens (and prepares where needed) what `data` names; empty for synthetic data.

    Raises:
      ConfigError, InputError: as their messages say.
    """
    sources = training_sources(config.data)
    stores = [prepared(source, config.data, tokenizer) for source in sources]
    if not stores:
        return Corpus([], [], [])
    # Together, so that a document that two sources share is held out of both or of none.
    held = held_out(np.concatenate([store.documents["hash"] for store in stores]), config.data.holdout)
    ends = np.cumsum([len(store.documents) for store in stores])
    return Corpus(sources, stores, np.split(held, ends[:-1]))


def require_same_everywhere(fingerprint: str) -> None:
    """Compares the data of all processes, where there are several.

    Raises:
      InputError: their files differ, so they would not agree on what a row is.
    """
    if "jax" not in sys.modules:
        return
    import jax

    if not jax.distributed.is_initialized():
        return
    from dsjax.processes import gather

    theirs = gather(fingerprint)
    different = [rank for rank, one in enumerate(theirs) if one != theirs[0]]
    if different:
        raise InputError(
            f"data: the files that process {', '.join(map(str, different))} reads differ from those of "
            "process 0; give every host the same files"
        )
