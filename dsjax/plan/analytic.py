"""Memory of a language model's step by formulas, without compiling: to prune a search, and where nothing compiles.

Memory is a count of the arrays that XLA's reports (`--xla_dump_to`: live ranges, buffer assignment) show in
its heap at the fullest moment, by their shapes (docs/plan.md says how near that comes).
"""

from __future__ import annotations

import math

from dsjax.plan import analytic_stages, experts
from dsjax.plan.compiled import memory_limit
from dsjax.plan.laid import Laid, lay_out
from dsjax.plan.result import MemoryUse

__all__ = ["Laid", "lay_out", "memory"]

# Sections of queries in packed attention; section i of n sees i / n of the keys.
_SECTIONS = 8
_BATCH_BYTES = 20  # a token: four int32 and one float32


def memory(laid: Laid) -> MemoryUse:
    """Bytes of a device: the state, the batch, and XLA's heap when it is fullest, in the head or in a layer."""
    parameters, optimizer = laid.state
    gradients = _whole(laid)
    if laid.stacking:
        temporary = analytic_stages.temporary(laid, _in_a_layer(laid))
    else:
        temporary = _kept(laid) + _gradients(laid) + max(_in_the_head(laid), _in_a_layer(laid))
    batch = int(_BATCH_BYTES * laid.tokens_a_device * laid.microbatches)
    total = int(parameters + optimizer + batch + laid.kept + temporary)
    return MemoryUse(
        parameters=parameters,
        gradients=min(gradients, int(temporary)),
        optimizer=optimizer,
        activations=max(0, int(temporary) - gradients),
        batch=batch,
        exchange=laid.kept,
        other=0,
        total=total,
        capacity=laid.target.chip.memory.bytes,
        limit=memory_limit(laid.target),
    )


def _kept(laid: Laid) -> float:
    """Bytes that the forward pass keeps for the backward pass, over all layers."""
    sizes, remat = laid.sizes, laid.config.train.remat
    if remat == "none":
        return sizes.layers * _kept_of_a_layer(laid)
    a_token = laid.item * laid.tokens_a_device / laid.tensor
    if remat == "dots":
        products = sizes.query + 2 * sizes.key + 2 * sizes.feed_forward
        # Layer and attention outputs; over `tensor` one of them twice, while XLA turns the stack of all layers' round.
        outputs = (2 if laid.mesh["tensor"] == 1 else 3) * sizes.hidden
        return sizes.layers * a_token * (outputs + products)
    return math.ceil(sizes.layers / _group(laid)) * a_token * sizes.hidden


def _group(laid: Laid) -> int:
    """Layers that are computed again together."""
    remat = laid.config.train.remat
    return min(int(remat.removeprefix("every_")), laid.sizes.layers) if remat.startswith("every_") else 1


def _kept_of_a_layer(laid: Laid) -> float:
    """Bytes that a layer keeps where nothing is computed again; its matrices, as they were gathered, are among them."""
    sizes, item = laid.sizes, laid.item
    # Norms keep their input and their result before the scale in fp32, and their output; over `tensor` that is whole
    # sequences, in two orders while XLA turns the stack of all layers' round.
    norms = 4 * 4 * sizes.hidden
    outputs = 2 * sizes.hidden * (1 if laid.mesh["tensor"] == 1 else 2 * laid.mesh["tensor"])
    products = 6 * sizes.feed_forward + 3 * sizes.query + 2 * sizes.key
    return (
        laid.tokens_a_device * (norms + item * (outputs + products)) + item * laid.layer_used
    ) / laid.tensor


def _kept_in_a_group(laid: Laid) -> float:
    """Bytes that a layer keeps while its group's backward pass runs: less, as its elementwise parts are made again."""
    sizes, whole = laid.sizes, laid.mesh["tensor"]
    products = 3 * sizes.feed_forward + 2 * (sizes.query + sizes.key)
    activations = laid.tokens_a_device * ((2 + 2 * whole) * sizes.hidden + products)
    return laid.item * (activations + laid.layer_used) / laid.tensor


def _gradients(laid: Laid) -> float:
    """Bytes of gradients in their places, from the first layer on (XLA makes the zeros early), and of their sums."""
    sizes, cut = laid.sizes, laid.shards * laid.tensor
    found = laid.gradient_item * sizes.layers * laid.layer / cut * laid.trained.layers
    if laid.shards > 1 and laid.config.train.remat != "none":
        # The down and output projections once more, with the dimension first along which they are gathered.
        turned = sizes.layers * sizes.hidden * (sizes.feed_forward + sizes.query)
        found += laid.gradient_item * turned / cut * laid.trained.layers
    return found + (_whole(laid) if laid.microbatches > 1 else 0)


def _whole(laid: Laid) -> int:
    """Bytes of the gradients of all parameters that train."""
    return laid.trained.numbers * laid.gradient_item


def _in_the_head(laid: Laid) -> float:
    """Bytes that are live beside those in the loss's loop over chunks of tokens, just before the backward pass."""
    sizes, item, tokens = laid.sizes, laid.item, laid.tokens_a_device
    chunk = tokens / math.ceil(tokens / laid.model.cross_entropy_chunk)
    columns = sizes.vocabulary / laid.tensor
    # The gradient of the head in fp32, before and after a chunk's is added, and the head gathered.
    head = (2 * 4 * laid.trained.ends + item) * sizes.hidden * columns
    logits = (4 + item) * chunk * columns
    # What the last layer's backward pass has asked for already: its matrices and activations.
    activations = 5 * sizes.hidden + 2 * (sizes.query + sizes.key)
    return head + logits + item * (laid.layer_used + tokens * activations) / laid.tensor


def _in_a_layer(laid: Laid) -> float:
    """Bytes that are live beside those in the backward pass of a layer, or of a group of them."""
    sizes, item, tensor = laid.sizes, laid.item, laid.tensor
    ends = 4 * (1 if sizes.tied else 2) * sizes.hidden * sizes.vocabulary / (tensor * laid.shards)
    ends *= laid.trained.ends
    # This layer's matrices gathered, and the gradients of the one before on their way to their places.
    matrices = (1 + laid.trained.layers) * item * laid.layer_used / tensor
    # Either the feed-forward is at work, or attention: every section's keys and values, or their gradients,
    # whole over `context`, and the values once more.
    seen = 1 + (_SECTIONS + 1) * laid.mesh["context"]
    feed_forward = 5 * sizes.hidden + 3 * sizes.query + 2 * sizes.key
    attention = 4 * sizes.hidden + 2 * sizes.query + seen * sizes.key
    # Gate, up, and their gradients; the first two are kept anyway unless all is computed again.
    gates = 4 if laid.config.train.remat == "full" else 2
    activations = (gates * sizes.feed_forward + max(feed_forward, attention)) / tensor
    if laid.mesh["tensor"] > 1:
        # Whole sequences: the products' input and the gradient of their output, each in two orders; the gradients of
        # queries', keys' and values' input, and their sum.
        activations += 8 * sizes.hidden / laid.mesh["tensor_rows"]
    found = ends + matrices + item * laid.tokens_a_device * activations + experts.temporary(laid)
    if laid.config.train.remat.startswith("every_"):
        found += _group(laid) * _kept_in_a_group(laid)
    return found
