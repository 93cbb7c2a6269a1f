"""The exchange of gradients between replicas: codecs, routes, error feedback."""

from dsjax.grad_sync.codecs import Codec, make_codec
from dsjax.grad_sync.exchange import (
    AXIS,
    Exchange,
    Tensor,
    mean,
    residual_spec,
    residual_specs,
    seed_of,
)
from dsjax.grad_sync.make import left_to_the_compiler, make_exchange
from dsjax.grad_sync.route import Route, choose_route

__all__ = [
    "AXIS",
    "Codec",
    "Exchange",
    "Route",
    "Tensor",
    "choose_route",
    "left_to_the_compiler",
    "make_codec",
    "make_exchange",
    "mean",
    "residual_spec",
    "residual_specs",
    "seed_of",
]
