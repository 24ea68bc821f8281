"""A device that is not the CPU, as far as torch's functions tell: for a worker on a CPU.

A GPU's tensors and the host's do not mix: an operation on both fails, and only a copy goes from one to
the other. On a CPU all tensors mix, and code that forgets to copy passes every test. Here some tensors
are marked as the device's: the paged cache, what the model computes, whatever is made with `device=`, and
what comes of them. Where our own code mixes them with others, it fails as on a GPU. vLLM's code may: its
model and its steps stay where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

from workbench.settings import ROOT

DEVICE = torch.device("xpu", 0)
COPIES = {"copy_", "to", "cpu"}
INDEXED = {"__getitem__", "__setitem__"}
TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{ROOT / 'semkv_rag'}/"


class OnDevice(Tensor):
    """A tensor that is taken for the device's."""


class FakeDevice(TorchFunctionMode):
    """Inside the block, in one thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func == Tensor.device.__get__:  # type: ignore[attr-defined]
                return DEVICE if isinstance(args[0], OnDevice) else func(*args)
            found = func(*args, **kwargs)
            return _marked(found) if isinstance(args[0], OnDevice) else found
        if name == "is_pinned":
            return False
        if name == "pin_memory":
            return args[0].clone()
        if _calls_from_ours():
            _require_one_device(name, args, kwargs)
        target, args, kwargs = _without_device(name, args, kwargs)
        if target is None:
            given = [one for one in tree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            target = any(isinstance(one, OnDevice) for one in given)
        result = func(*args, **kwargs)
        known = {id(one) for one in tree.tree_leaves((args, kwargs))}
        moved = name in COPIES and bool(args) and isinstance(args[0], OnDevice) != target

        def marked(one: Any) -> Any:
            if not isinstance(one, Tensor) or (id(one) in known and not moved):
                return one
            # What a device has is never the host's own memory.
            one = one.clone() if moved and name != "copy_" else one
            return one.as_subclass(OnDevice if target else Tensor)

        return tree.tree_map(marked, result)


def _without_device(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool | None, tuple[Any, ...], dict[str, Any]]:
    """Whether the result is to be the device's, if a call says so; and the call, on the CPU."""
    kwargs.pop("pin_memory", None)
    if name == "cpu":
        return False, args, kwargs
    if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
        return isinstance(args[1], OnDevice), args, kwargs
    target: bool | None = None
    given = [*args, *kwargs.values()]
    for one in given:
        if isinstance(one, torch.device):
            target = one.type == DEVICE.type
    if isinstance(kwargs.get("device"), str):
        target = False
    cpu = torch.device("cpu")
    args = tuple(cpu if isinstance(one, torch.device) else one for one in args)
    return (
        target,
        args,
        {key: cpu if isinstance(one, torch.device) else one for key, one in kwargs.items()},
    )


def _require_one_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in COPIES:
        return
    if name == "numpy" and isinstance(args[0], OnDevice):
        raise TypeError("can't convert a tensor of the device to numpy: use Tensor.cpu() first")
    leaves = tree.tree_leaves((args, kwargs))
    if name in INDEXED:
        itself, index, *value = args
        indices = [one for one in tree.tree_leaves(index) if isinstance(one, Tensor)]
        if not indices:  # a copy
            return
        # A device is indexed by the host's tensors, too.
        leaves = [itself, *value, *(indices if not isinstance(itself, OnDevice) else ())]
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    here = [isinstance(one, OnDevice) for one in tensors]
    if any(here) and any(not on and one.dim() for on, one in zip(here, tensors, strict=True)):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def _calls_from_ours() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


class _Torch:
    """torch, but for what it has of streams."""

    class Event:
        def __init__(self, *_: Any) -> None: ...

        def record(self, *_: Any) -> None: ...

    class Stream:
        def __init__(self, *_: Any) -> None: ...

        def wait_event(self, *_: Any) -> None: ...

        def synchronize(self) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class accelerator:  # noqa: N801
        @staticmethod
        def current_stream(*_: Any) -> None: ...

        class device_index:  # noqa: N801
            def __init__(self, *_: Any) -> None: ...

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _marked(one: Any) -> Any:
    return one.as_subclass(OnDevice) if isinstance(one, Tensor) else one


def _on_device(function: Callable[..., Any], answers: bool = False) -> Callable[..., Any]:
    """A function that vLLM's model calls, given the device's tensors; `answers`: gives them, too.

    torch takes a mode away while a call that it has seen runs, and the model's layers are such calls.
    """

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with FakeDevice():
            result = function(*map(_marked, args), **kwargs)
            return _marked(result) if answers else result

    return called


def install(worker: Any) -> tuple[bool, str | None]:
    """Have a worker's blends and captures run on such a device from now on; what its gate says."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from semkv_rag.connector import threads
    from semkv_rag.connector.worker.model import device_stream
    from semkv_rag.connector.worker.model.kv_tap import KVTap
    from semkv_rag.connector.worker.model.layer import Layer
    from semkv_rag.connector.worker.model.sliced_model import SlicedModel

    device_stream.torch = _Torch()  # type: ignore[assignment]
    KVTap._handle = _on_device(KVTap._handle)  # type: ignore[method-assign]
    SlicedModel._run = _on_device(SlicedModel._run, answers=True)  # type: ignore[method-assign]
    sinks = Layer.sinks.fget  # the model's own
    Layer.sinks = property(lambda layer: _marked(sinks(layer)))  # type: ignore[method-assign,assignment,misc]
    asking = KVTap.asking
    KVTap.asking = lambda tap, asker: asking(tap, _on_device(asker))  # type: ignore[method-assign]
    bind = threads._bind_to
    entered = set[int]()

    def bind_and_enter(cores: set[int]) -> None:
        import threading

        bind(cores)
        if threading.get_ident() not in entered:
            entered.add(threading.get_ident())
            FakeDevice().__enter__()

    threads._bind_to = bind_and_enter
    FakeDevice().__enter__()
    runner = worker.model_runner
    runner.device = DEVICE
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(getattr(layer, "kv_cache", None), Tensor):
            layer.kv_cache = layer.kv_cache.as_subclass(OnDevice)
    executor = get_kv_transfer_group().executor
    executor.close()
    executor.bind(runner)
    return executor.gate.servable, executor.gate.reason
