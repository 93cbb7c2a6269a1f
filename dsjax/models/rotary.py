"""Rotary position embeddings (Su et al. 2021) with the scalings of Hugging Face configs.

`scaling` is a config's `rope_scaling` (or `rope_parameters`): None, or a mapping with `rope_type`
and that type's numbers.  Heads are rotated in halves, as Hugging Face weights expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.errors import ConfigError

# Cosine and sine of each position's angles.
Tables = tuple[jax.Array, jax.Array]

# Numbers that each kind needs, and those it may have, besides rope_type (or type) and rope_theta.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        ),
    ),
}  # fmt: skip


def check_scaling(scaling: Mapping[str, Any] | None, key: str = "model.rope_scaling") -> None:
    """Refuses a scaling that is not known or not complete.

    Raises:
      ConfigError: naming what is missing or unknown.
    """
    if scaling is None:
        return
    kind = _kind(scaling)
    if kind not in _KINDS:
        raise ConfigError(f"{key}.rope_type: takes {', '.join(_KINDS)}, got {kind}")
    needed, optional = _KINDS[kind]
    faults = [
        f"{key}.{name}: is missing; {kind} needs {', '.join(needed)}"
        for name in needed
        if name not in scaling
    ]
    known = {"rope_type", "type", "rope_theta", *needed, *optional}
    faults += [
        f"{key}.{name}: unknown key; {kind} takes {', '.join((*needed, *optional)) or 'no numbers'}"
        for name in scaling
        if name not in known
    ]
    for name in set(needed + optional) - {"truncate"}:
        value = scaling.get(name)
        if value is not None and (type(value) not in (int, float) or value <= 0):
            faults.append(f"{key}.{name}: takes a number > 0, got {value!r}")
    if faults:
        raise ConfigError(faults)


def _kind(scaling: Mapping[str, Any] | None) -> str:
    scaling = scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int, length: int
) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of dimensions, and the factor on cosine and sine.

    Args:
      theta: base of the frequencies.
      scaling: as in a Hugging Face config, already checked.
      max_positions: `max_position_embeddings` of the config.
      length: length of the sequences at hand; only `dynamic` depends on it.

    Returns:
      float32 [head_dim / 2] and a number.
    """
    kind, scaling = _kind(scaling), scaling or {}
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    exponents = np.arange(0, head_dim, 2) / head_dim
    if kind == "dynamic":
        # NTK-aware: the base grows once the sequence is longer than the model was trained on.
        factor, longest = scaling["factor"], max(length, original)
        theta *= (factor * longest / original - (factor - 1)) ** (head_dim / (head_dim - 2))
    base = 1.0 / theta**exponents
    if kind == "linear":
        return (base / scaling["factor"]).astype(np.float32), 1.0
    if kind == "llama3":
        return _llama3(base, scaling, original).astype(np.float32), 1.0
    if kind == "yarn":
        frequencies, attention = _yarn(base, head_dim, theta, scaling, original, scaling["factor"])
        return frequencies.astype(np.float32), attention
    return base.astype(np.float32), 1.0


def _llama3(base: np.ndarray, scaling: Mapping[str, Any], original: int) -> np.ndarray:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * math.pi / base
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * base / factor + blend * base


def _yarn(
    base: np.ndarray, head_dim: int, theta: float, scaling: Mapping[str, Any], original: int, factor: float
) -> tuple[np.ndarray, float]:
    """Peng et al. 2023: blends stretched and kept frequencies by the turns a dimension makes."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)

    def attention_scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = attention_scale(1)
        if mscale and all_dims:
            attention = attention_scale(mscale) / attention_scale(all_dims)
    return frequencies, float(attention)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a model.

    Attributes:
      head_dim: dimensions of a head, even.
      theta: base of the frequencies.
      scaling: the checked scaling's items.
      max_positions: `max_position_embeddings` of the config.
    """

    head_dim: int
    theta: float
    scaling: tuple[tuple[str, Any], ...]
    max_positions: int

    def tables(self, positions_bs: jax.Array, frequencies: jax.Array | None = None) -> Tables:
        """Cosine and sine, float32 [b, s, 1, head_dim / 2], of each position's angles.

        Args:
          frequencies: of each row, [b, head_dim / 2]; by default those of a sequence of s.
        """
        own, factor = self.frequencies(positions_bs.shape[1])
        rows = own if frequencies is None else frequencies[:, None, None]
        angles = positions_bs[..., None, None].astype(jnp.float32) * rows
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """`inverse_frequencies` of a sequence of so many tokens."""
        return inverse_frequencies(self.head_dim, self.theta, dict(self.scaling), self.max_positions, length)


def rotate(x_bsnh: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each pair (x[i], x[i + h/2]) by its angle; in fp32, the result in x's type."""
    first, second = jnp.split(x_bsnh.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_bsnh.dtype)
