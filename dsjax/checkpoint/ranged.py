"""Arrays of a copy, straight from its object store: each process reads the byte ranges that its devices need."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import tensorstore

from dsjax.checkpoint.faults import unreadable
from dsjax.checkpoint.stored import STATE

_METADATA = "_METADATA"
# Reads under way at once, over all arrays: enough to fill a fast link to a store that answers slowly.
_READS = 64


def kvstore(url: str) -> dict[str, Any] | None:
    """TensorStore's name for a store's URL; None where it has no driver for it.

    Of S3 stores AWS_ENDPOINT_URL and AWS_REGION count; credentials are found as the driver does.
    """
    parts = urlsplit(url)
    path = parts.path.strip("/")
    folder = f"{path}/" if path else ""
    if parts.scheme == "file":
        return {"driver": "file", "path": f"/{folder}"}
    if parts.scheme == "gs":
        return {"driver": "gcs", "bucket": parts.netloc, "path": folder}
    if parts.scheme == "s3":
        spec = {"driver": "s3", "bucket": parts.netloc, "path": folder}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"aws_region": region} if region else {}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        # Without a region the driver asks the server for it, which others than Amazon's do not answer.
        return spec | ({"endpoint": endpoint, "aws_region": region or "us-east-1"} if endpoint else {})
    return None


class RangedCopy:
    """One step's copy in a store.

    Args:
      base: of the store, by `kvstore`.
      step: which copy.
      where: for messages.
    """

    def __init__(self, base: Mapping[str, Any], step: int, where: str):
        self._base, self._where = {**base, "path": f"{base['path']}{step}/{STATE}/"}, where
        self._context = tensorstore.Context(
            {"s3_request_concurrency": {"limit": _READS}, "gcs_request_concurrency": {"limit": _READS}}
        )

    def arrays(self) -> dict[str, Any]:
        """Names of all arrays -> open arrays, of which nothing has been read.

        Raises:
          Damaged: the copy cannot be read.
        """
        try:
            store = tensorstore.KvStore.open(self._base, context=self._context).result()
            told = json.loads(store[_METADATA])
            names = ["/".join(ast.literal_eval(key)) for key in told["tree_metadata"]]
            return {name: opened.result() for name, opened in {n: self._open(n) for n in names}.items()}
        except Exception as error:
            raise unreadable(self._where, error) from error

    def _open(self, name: str) -> Any:
        inner = {"driver": "ocdbt", "base": self._base, "path": f"{name.replace('/', '.')}/"}
        return tensorstore.open({"driver": "zarr", "kvstore": inner}, read=True, context=self._context)

    def read(self, arrays: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Arrays in the places of the abstract ones of the same names.

        Raises:
          Damaged: what this process needs of the copy cannot be read.
        """
        try:
            begun = {name: self._begin(arrays[name], leaf) for name, leaf in wanted.items()}
            return {name: _placed(begun[name], leaf) for name, leaf in wanted.items()}
        except Exception as error:
            raise unreadable(self._where, error) from error

    def _begin(self, array: Any, leaf: Any) -> dict[jax.Device, Any]:
        """Device -> the read of its part; devices that hold the same share a read."""
        places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        reads: dict[str, Any] = {}
        for index in places.values():
            if str(index) not in reads:
                reads[str(index)] = array[index].read()
        return {device: reads[str(index)] for device, index in places.items()}


def _placed(reads: Mapping[jax.Device, Any], leaf: Any) -> jax.Array:
    # Copies: on a CPU a device array could share the memory of the read, and so with other devices' arrays.
    parts = [jnp.array(read.result(), leaf.dtype, copy=True, device=d) for d, read in reads.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts, dtype=leaf.dtype)
