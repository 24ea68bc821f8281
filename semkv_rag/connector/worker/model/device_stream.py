"""A stream of its own for what a thread does on the device beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor

from semkv_rag.store.codecs import EncodedLayer


class DeviceStream:
    """Made by the model's thread; entered, and ended, by the other one. Nothing on a CPU.

    What it runs begins behind all that the model's thread had launched when it was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        if device.type != "cpu":
            launched = torch.Event(device)
            launched.record(torch.accelerator.current_stream(device))
            self._stream = torch.Stream(device)
            self._stream.wait_event(launched)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)

    def pinned(self, layer: EncodedLayer) -> EncodedLayer:
        """A layer in memory of the host that the device copies from by itself; for any thread."""
        if self._stream is None:
            return layer
        with torch.accelerator.device_index(self._device.index):
            parts = {name: _pinned(part) for name, part in layer.parts.items()}
        return replace(layer, parts=parts)

    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device; until `finish` the device may still be copying it.

        What stands in pageable memory goes through pinned memory, of which torch has a ring.
        """
        if self._stream is None:
            return tensor
        return _pinned(tensor).to(self._device, non_blocking=True)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the host, one behind the other, on the device; as for `bring`."""
        if self._stream is None:
            return torch.cat([*tensors])
        first, lengths = tensors[0], [len(one) for one in tensors]
        joined = torch.empty(sum(lengths), *first.shape[1:], dtype=first.dtype, device=self._device)
        for place, one in zip(torch.split(joined, lengths), tensors, strict=True):
            place.copy_(_pinned(one), non_blocking=True)
        return joined

    def finish(self) -> None:
        """Return when the device has done all of it: then any stream may read it."""
        if self._stream is not None:
            self._stream.synchronize()


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()
