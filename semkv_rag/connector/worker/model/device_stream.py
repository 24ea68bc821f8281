"""A stream of its own for what a thread does on the device beside the model."""

from __future__ import annotations

from types import TracebackType

import torch


class DeviceStream:
    """Made by the model's thread; entered, and ended, by the other one. Nothing on a CPU.

    What it runs begins behind all that the model's thread had launched when it was made.
    """

    def __init__(self, device: torch.device) -> None:
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

    def finish(self) -> None:
        """Return when the device has done all of it: then any stream may read it."""
        if self._stream is not None:
            self._stream.synchronize()
