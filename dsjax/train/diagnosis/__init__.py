"""Where in a model numbers first were not finite: a skipped step's loss and gradient, computed again with taps."""

from dsjax.train.diagnosis.locate import Diagnosis

__all__ = ["Diagnosis"]
