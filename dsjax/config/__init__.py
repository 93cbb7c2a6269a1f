"""The settings of a run: schema, loading, messages, reference."""

from dsjax.config.changes import FREE_ON_RESUME, changed, differences
from dsjax.config.load import dump, from_dict, load
from dsjax.config.schema import Config

__all__ = ["FREE_ON_RESUME", "Config", "changed", "differences", "dump", "from_dict", "load"]
