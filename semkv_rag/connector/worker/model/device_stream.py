"""A stream of its own for what a thread does on the device beside the model."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor


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

    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device; until `finish` the device may still be copying it.

        What stands in pageable memory goes through pinned memory, of which torch has a ring.
        """
        if self._stream is None:
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def finish(self) -> None:
        """Return when the device has done all of it: then any stream may read it."""
        if self._stream is not None:
            self._stream.synchronize()
