"""State files: one image's features, written once and never changed.

Features are what the model's projector made of an image, so that vision tower and projector need
not run again. `write_state` runs in the background of the request that computed it, `StateFile` is read
once for an image whose features are needed. docs/images.md is the specification.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from semkv_rag.errors import StateFileError, StoreError
from semkv_rag.store.files.finite import is_finite, raw_bytes
from semkv_rag.store.files.header import check_owner
from semkv_rag.store.files.tensor_file import TensorEntry, TensorFile
from semkv_rag.store.files.tensor_format import FileFormat, dtype_name
from semkv_rag.store.files.tensor_writer import write_tensors

FORMAT: Final = FileFormat("semkv.state", 1, "state file", StateFileError)
_TENSOR: Final = "state"
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_KEY: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Everything the index holds of an image's features, so that it can be rebuilt from the files alone.

    Attributes:
        model: fingerprint of the model that computed it.
        namespace: the tenant it belongs to.
        key: which image, 64 hex digits; see `connector.images.identifiers`.
        rows: image tokens of the prompt that it stands for.
        width: numbers of each.
        dtype: torch's name of their dtype.
        created_at: seconds since the epoch.
    """

    model: str
    namespace: str
    key: str
    rows: int
    width: int
    dtype: str
    created_at: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        """See `state_id`."""
        return state_id(self.model, self.namespace, self.key)


def state_id(model: str, namespace: str, key: str) -> str:
    """The address of a state: 64 hex digits of BLAKE3. No two tenants or models share one.

    Raises:
        StoreError: the key is not 64 hex digits.
    """
    if not _KEY.fullmatch(key):
        raise StoreError(f"{key!r} cannot be a state's key: it is 64 hex digits")
    hasher = blake3(b"semkv.state")
    for part in (model.encode(), namespace.encode(), key.encode()):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def write_state(
    path: str | os.PathLike[str], model: str, namespace: str, key: str, state: Tensor
) -> int:
    """Write a state file so that it is there whole or not at all; its size in bytes.

    Args:
        path: where it goes; a file there is replaced.
        model, namespace, key: whose it is, see `StateHeader`.
        state: [image tokens, width], on any device.

    Raises:
        StoreError: the state cannot be stored: it has another shape or holds NaN or infinity.
        OSError: the file could not be written (disk full); nothing of it is left.
    """
    state = state.detach().cpu().contiguous()
    if state.ndim != 2 or not state.numel() or state.dtype not in _DTYPES:
        raise StoreError(
            f"an image's features are [tokens, width], not {list(state.shape)} {state.dtype}"
        )
    if not is_finite(state, raw_bytes(state)):
        raise StoreError("the image's features hold NaN or infinity")
    metadata = {
        "id": state_id(model, namespace, key),
        "model": model,
        "namespace": namespace,
        "key": key,
        "dtype": dtype_name(state.dtype),
        "created_at": repr(time.time()),
    }
    return write_tensors(Path(path), FORMAT, metadata, {_TENSOR: state})


class StateFile(TensorFile):
    """A state file, open for reading; a context manager.

    Args:
        path: the file.
        model: fingerprint of the model that must have written it; None accepts any.
        state_id: the state that it must hold; None accepts any.

    Attributes:
        header: what the file says of itself.
        path: the file.
        size_bytes: its size.

    Raises:
        StateFileError: it is missing, torn, altered, or another model's or image's.
        StoreVersionError: a newer version wrote it.
    """

    FORMAT = FORMAT

    header: StateHeader

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None,
        state_id: str | None = None,
    ) -> None:
        self._model = model
        self._state_id = state_id
        super().__init__(path)

    def state(self) -> Tensor:
        """The state, [image tokens, width] on the CPU, its checksum verified and all of it finite.

        Raises:
            StateFileError: the bytes are not those that were written, or some are no numbers.
        """
        return self._tensor(_TENSOR)

    def _check_entries(
        self, metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        entry = entries.get(_TENSOR)
        if entry is None or len(entries) != 1:
            raise self._unusable("its tensors are not those of a state")
        fits = len(entry.shape) == 2 and entry.dtype in _DTYPES
        if not fits or dtype_name(entry.dtype) != metadata["dtype"]:
            raise self._unusable(f"its tensor {_TENSOR} does not fit the header")

    def _take_header(self, metadata: Mapping[str, str]) -> None:
        rows, width = self._entries[_TENSOR].shape
        try:
            self.header = StateHeader(
                model=metadata["model"],
                namespace=metadata["namespace"],
                key=metadata["key"],
                rows=rows,
                width=width,
                dtype=metadata["dtype"],
                created_at=float(metadata["created_at"]),
            )
            check_owner(self.header.model, self.header.namespace, self.header.created_at)
            claimed = metadata["id"]
            id_ = self.header.id
        except (KeyError, ValueError, StoreError) as error:
            raise self._unusable(f"its header cannot be understood: {error!r}") from error
        if id_ != claimed:
            raise self._unusable("its id is not that of its model, namespace and key")
        if self._model is not None and self.header.model != self._model:
            raise self._error(f"was written by another model ({self.header.model[:16]})")
        if self._state_id is not None and id_ != self._state_id:
            raise self._error(f"holds another image's state ({id_[:16]})")
