"""vLLM's own kernels for what a compiled model leaves to Inductor.

In a compiled model, vLLM's norms, activations and rotary embeddings consist of PyTorch's operations,
which Inductor fuses. A blend's forward skips the compiled model and would run these operations one by
one, with several launches for each on a GPU. So during a blend's forward these layers use the kernels
that an engine with `enforce_eager` uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from typing import Any, TypeAlias

from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform

Method: TypeAlias = Callable[..., Any]

_KINDS = ("layernorm", "activation", "rotary_embedding")
_MODULES = tuple(f"vllm.model_executor.layers.{kind}" for kind in _KINDS)
"""Layers that are defined there. Other custom operations of vLLM's, such as mixtures of experts, do more
than call a kernel, and are left alone."""


class EagerKernels:
    """The kernels of one model. Nothing changes where the model is not compiled."""

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        # Each with its usual method, and the one that calls the kernel.
        self._layers: list[tuple[CustomOp, Method, Method]] = []
        self._priority: IrOpPriorityConfig | None = None
        if config.compilation_config.mode in (None, CompilationMode.NONE):
            return
        eager = _uncompiled(config)
        with set_current_vllm_config(eager):
            for layer in model.modules():
                if isinstance(layer, CustomOp) and type(layer).__module__.startswith(_MODULES):
                    own = layer.dispatch_forward(compile_native=False)
                    self._layers.append((layer, layer._forward_method, own))
        self._priority = eager.kernel_config.ir_op_priority

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the block the layers use them."""
        if self._priority is None:
            yield
            return
        try:
            for layer, _, own in self._layers:
                layer._forward_method = own
            with self._priority.set_priority():
                yield
        finally:
            for layer, usual, _ in self._layers:
                layer._forward_method = usual


def _uncompiled(config: VllmConfig) -> VllmConfig:
    """vLLM's configuration with what it would choose without compiling, and what its user chose."""
    eager = copy(config)
    compilation = eager.compilation_config = copy(config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.custom_ops = ["all", *(op for op in compilation.custom_ops if op[0] in "+-")]
    compilation.enabled_custom_ops, compilation.disabled_custom_ops = Counter(), Counter()
    eager.kernel_config = copy(config.kernel_config)
    eager.kernel_config.ir_op_priority = _priority(config, eager)
    return eager


def _priority(config: VllmConfig, eager: VllmConfig) -> IrOpPriorityConfig:
    """What each operation is done with: what the user named first, then as without compiling."""
    given = config.kernel_config.ir_op_priority
    compiled = current_platform.get_default_ir_op_priority(config)
    chosen = current_platform.get_default_ir_op_priority(eager)
    lists = {}
    for field in fields(IrOpPriorityConfig):
        usual, own = getattr(compiled, field.name), getattr(chosen, field.name)
        named = [one for one in getattr(given, field.name) if one not in usual]
        lists[field.name] = list(dict.fromkeys([*named, *own]))
    return IrOpPriorityConfig(**lists)
