"""Which documents are held out: decided by what they say, so the same for ever."""

from __future__ import annotations

from typing import Any

import numpy as np


def held_out(hashes: Any, share: float) -> np.ndarray:
    """Which of the documents are held out.

    A document is held out where its hash is among the lowest `share` of all hashes: more data, another
    order or another run never moves it, and copies stay together. In data so small that none is, it is
    the one document with the lowest hash; where all are, the one with the highest is trained on.

    Args:
      hashes: 64-bit hashes of the documents' content [N].
      share: from 0 (nothing is held out) to below 1.

    Returns:
      bool [N].
    """
    hashes = np.asarray(hashes, np.uint64)
    if share == 0 or not hashes.size:
        return np.zeros(hashes.shape, bool)
    held = hashes < np.uint64(int(share * 2**64))
    if not held.any():
        held = hashes == hashes.min()
    return hashes != hashes.max() if held.all() else held
