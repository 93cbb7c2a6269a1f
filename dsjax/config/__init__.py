"""The settings of a run: schema, loading, messages, reference."""

from dsjax.config.changes import FREE_ON_RESUME, changed
from dsjax.config.load import dump, from_dict, load
from dsjax.config.schema import Config

__all__ = ["FREE_ON_RESUME", "Config", "changed", "dump", "from_dict", "load"]
