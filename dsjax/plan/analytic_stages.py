"""Memory of a pipelined step by formulas: XLA's heap beside the state, counted as in `analytic`.

Three things fill it: what the loop over ticks carries (stashes, gradients), what all stages hold of embedding and
head, and the fullest moment in between: the gathers before the loop, the head, or the backward of a layer.
"""

from __future__ import annotations

from dsjax.pipelining.executor import Work
from dsjax.plan.laid import Laid


def temporary(laid: Laid, in_a_layer: float) -> float:
    """Bytes that are live beside state and batch at the fullest moment.

    Args:
      in_a_layer: of a layer's backward pass, beside what it is given.
    """
    rest, whole = _rest(laid)
    carried = stash(laid) + 2 * activation(laid) + _workspace(laid) + _gradients(laid)
    ends = 2 if not laid.sizes.tied else 1
    # Gathered over the stages, and turned round; afterwards each device takes its columns.
    before = (1 + 1 / ends) * whole + _gathered_once(laid)
    within = rest + _gathered_once(laid) + max(_in_the_head(laid), in_a_layer)
    return carried + max(before, within)


def stash(laid: Laid) -> float:
    """Bytes of the slots that outlive a tick: inputs, gradients, and what forwards kept for their backwards."""
    work = work_of(laid)
    slots = work.slots
    activations = slots.inputs + max(slots.gradients, 1) + slots.residuals
    kept = slots.residuals * kept_of_a_layer(laid) + slots.crossings * _crossing_of_a_layer(laid)
    return activations * activation(laid) + work.layers * kept


def kept_of_a_layer(laid: Laid) -> float:
    """Bytes that a layer's forward leaves for its backward; no weights."""
    sizes, remat, whole = laid.sizes, laid.config.train.remat, laid.mesh["tensor"]
    if remat == "full":
        return activation(laid)
    if remat == "dots":
        features = 2 * sizes.hidden + sizes.query + 2 * sizes.key + 2 * sizes.feed_forward
        return laid.item * laid.tokens_a_device * features / laid.tensor
    # The norms' input and result in fp32; the input of each product, of whole sequences and once for all
    # three of attention's where `tensor` cuts them.
    inputs = (4 if whole == 1 else 2 * whole) * sizes.hidden
    products = 3 * sizes.query + 2 * sizes.key + 6 * sizes.feed_forward
    return laid.tokens_a_device * (4 * 4 * sizes.hidden + laid.item * (inputs + products)) / laid.tensor


def _crossing_of_a_layer(laid: Laid) -> float:
    """Bytes that the input's half of a layer's backward leaves for the weights' half."""
    sizes = laid.sizes
    products = 2 * sizes.hidden + sizes.query + 2 * sizes.key + 2 * sizes.feed_forward
    return laid.tokens_a_device * (2 * 4 * sizes.hidden + laid.item * products) / laid.tensor


def work_of(laid: Laid) -> Work:
    """The schedule, laid out for the model."""
    assert laid.stacking is not None
    return laid.stacking.pipelining.work


def activation(laid: Laid) -> float:
    """Bytes of a microbatch between two layers."""
    return laid.item * laid.tokens_a_device * laid.sizes.hidden / laid.tensor


def _workspace(laid: Laid) -> float:
    """Bytes of the residuals of one chunk, which its backward makes first where it computes it again."""
    work = work_of(laid)
    return work.layers * kept_of_a_layer(laid) if work.slots.keep == "inputs" else 0.0


def layers_held(laid: Laid) -> int:
    """Slots for layers of a stage."""
    work = work_of(laid)
    return work.layers * work.schedule.virtual


def _cut(laid: Laid) -> int:
    """Parts of what a stage holds of its gradients."""
    return laid.tensor * (laid.shards if laid.config.train.fsdp_gather == "layer" else 1)


def _ends(laid: Laid) -> float:
    """Elements of embedding and head."""
    return (1 if laid.sizes.tied else 2) * laid.sizes.hidden * laid.sizes.vocabulary


def _gradients(laid: Laid) -> float:
    """Bytes of the fp32 sums: of the stage's layers, and of embedding and head whole on all stages."""
    sizes, layers = laid.sizes, layers_held(laid)
    learning = laid.trained
    found = 4 * (layers * laid.layer * learning.layers + _ends(laid) * learning.ends) / _cut(laid)
    if _cut(laid) > laid.tensor:
        # The down and output projections once more, with the dimension first along which they are gathered.
        turned = layers * sizes.hidden * (sizes.feed_forward + sizes.query)
        found += 4 * turned * learning.layers / _cut(laid)
    return found


def _rest(laid: Laid) -> tuple[float, float]:
    """Bytes of embedding and head as stages hold them, and as they come out of the gather over stages.

    Cut over `pipeline` and `tensor` along the same dimension they are gathered over both.
    """
    held = laid.item * _ends(laid) / (laid.tensor * laid.shards)
    return held, held * (laid.mesh["tensor"] if laid.ends_gathered_over_tensor else 1)


def _gathered_once(laid: Laid) -> float:
    """Bytes of all parameters of the stage where they are gathered before the first tick."""
    if laid.config.train.fsdp_gather == "layer" or laid.shards == 1:
        return 0.0
    return laid.item * (layers_held(laid) * laid.layer_used + _ends(laid)) / laid.tensor


def _in_the_head(laid: Laid) -> float:
    """Bytes that are live beside those in the head: its gradient, before and after a chunk's is added, and itself."""
    a_number = 2 * 4 * laid.trained.ends + 2 * laid.item
    return a_number * laid.sizes.hidden * laid.sizes.vocabulary / laid.tensor
