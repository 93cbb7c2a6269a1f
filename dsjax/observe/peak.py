"""Peak arithmetic of accelerators, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

# (a part of jax's device_kind, lower case; peak of float32, of bfloat16 and float16), in TFLOP/s, dense
# (no sparsity), from the vendors' data sheets.  The first that matches counts, so longer names stand
# first.  float32 on NVIDIA chips is the TF32 tensor-core figure: jax's default precision multiplies
# float32 matrices in TF32 there, and a utilisation above 1 would be of no use.  For TPUs the vendor
# gives no float32 figure.
_TABLE: tuple[tuple[str, float | None, float], ...] = (
    ("gb200", 1250.0, 2500.0),  # NVIDIA GB200 NVL72 data sheet, a GPU
    ("b200", 1125.0, 2250.0),  # NVIDIA HGX B200 data sheet, a GPU
    ("gh200", 494.7, 989.4),  # NVIDIA GH200 data sheet
    ("h200 nvl", 417.5, 835.5),  # NVIDIA H200 data sheet
    ("h200", 494.7, 989.4),  # NVIDIA H200 data sheet (SXM)
    ("h100 pcie", 378.0, 756.0),  # NVIDIA H100 data sheet (PCIe)
    ("h100 nvl", 417.5, 835.5),  # NVIDIA H100 data sheet (NVL)
    ("h100", 494.7, 989.4),  # NVIDIA H100 data sheet (SXM5)
    ("a100", 156.0, 312.0),  # NVIDIA A100 data sheet
    ("l40s", 183.0, 362.05),  # NVIDIA L40S data sheet
    ("rtx 4090", 82.6, 165.2),  # NVIDIA Ada architecture paper, appendix A (accumulation in fp32)
    ("tpu v6", None, 918.0),  # Google Cloud TPU v6e documentation; jax calls it TPU v6 lite
    ("tpu v5p", None, 459.0),  # Google Cloud TPU v5p documentation
    ("tpu v5 lite", None, 197.0),  # Google Cloud TPU v5e documentation
    ("tpu v5e", None, 197.0),
    ("tpu v5", None, 459.0),  # what jax calls a v5p
    ("tpu v4", None, 275.0),  # Google Cloud TPU v4 documentation (a chip; jax shows one device a chip)
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak of one device, in FLOP/s, dense; None where it is not known (CPUs, other chips or types).

    Args:
      device_kind: as `jax.Device.device_kind` names it.
      dtype: type of the matrix products: "float32" (TF32 on NVIDIA chips, as jax computes them by
        default), "bfloat16" or "float16".
    """
    kind = device_kind.lower()
    if " mig " in kind:  # a slice of a chip
        return None
    for part, float32, half in _TABLE:
        if part in kind:
            peak = {"float32": float32, "bfloat16": half, "float16": half}.get(dtype)
            if dtype == "float16" and kind.startswith("tpu"):
                peak = None
            return None if peak is None else peak * 1e12
    return None
