"""The loss scale by its rules, and training in fp16 with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import from_dict
from dsjax.config.precision import LossScaleConfig
from dsjax.errors import ConfigError
from dsjax.precision.loss_scale import LossScale, first_scale, next_scale, nominal_weight


def run(config: LossScaleConfig, overflows: list[bool]) -> list[LossScale]:
    """The scale before each step and after the last."""
    turn = jax.jit(lambda now, overflow: next_scale(config, now, overflow))
    now = first_scale(config)
    seen = [now]
    for overflow in overflows:
        now = turn(now, jnp.bool_(overflow))
        seen.append(now)
    return seen


def scales(seen: list[LossScale]) -> list[float]:
    return [float(one.scale) for one in seen]


def test_the_first_overflow_is_borne_with_and_each_after_it_halves() -> None:
    config = LossScaleConfig(initial=256.0, growth_interval=4)
    assert scales(run(config, [True, True, True, False])) == [256, 256, 128, 64, 64]
    assert scales(run(LossScaleConfig(initial=4.0, hysteresis=1), [True] * 4)) == [4, 2, 1, 1, 1]


def test_patience_comes_back_only_when_the_scale_grows() -> None:
    config = LossScaleConfig(initial=256.0, growth_interval=3, target_rate=0.9)
    seen = run(config, [True, True, False, False, True, False, False, False, True])
    # The third overflow halves although steps without one lie between; after the growth one is borne with again.
    assert scales(seen) == [256, 256, 128, 128, 128, 64, 64, 64, 128, 128]
    assert int(seen[-1].overflows) == 4


def test_frequent_overflows_veto_growth_but_never_delay_a_decrease() -> None:
    config = LossScaleConfig(initial=2.0**20, growth_interval=10)
    seen = run(config, [True] * 6 + [False] * 400)
    assert float(seen[-1].rate) > config.target_rate
    assert scales(seen)[6:] == [2.0**15] * 401
    later = run(config, [True] * 6 + [False] * 900)
    first = next(i for i, one in enumerate(later[7:]) if float(one.scale) > 2.0**15)
    assert float(later[7 + first].rate) <= config.target_rate and first > 600


def test_a_scale_that_starts_too_low_climbs_until_it_is_sound_and_stays_in_its_bounds() -> None:
    seen = scales(run(LossScaleConfig(initial=1.0), [False] * 20))
    assert seen[:17] == [2.0**i for i in range(17)] and seen[17:] == [2.0**16] * 4
    met = scales(run(LossScaleConfig(initial=1.0, hysteresis=1), [False] * 5 + [True] + [False] * 5))
    assert met[5:] == [32.0, *[16.0] * 6]
    assert scales(run(LossScaleConfig(initial=2.0**24, growth_interval=1), [False] * 3)) == [2.0**24] * 4


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"initial": 3.0}, "precision.loss_scale.initial: takes a power of two from 1 to 2^24"),
        ({"minimum": 4.0, "initial": 2.0}, "initial: lies between minimum and maximum"),
    ],
)
def test_scales_that_make_no_sense_are_refused(settings: dict[str, float], fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict({"precision": {"loss_scale": settings}})
    assert fault in " ".join(refused.value.faults)


def test_the_weight_of_a_batch_is_about_its_tokens_or_its_rows() -> None:
    rows = np.zeros((2, 3, 5))
    assert nominal_weight({"weights": rows}) == 32 and nominal_weight({"x": rows}) == 8
