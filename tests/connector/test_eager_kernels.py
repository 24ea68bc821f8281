"""What blends run beside a compiled model: vLLM's kernels, while they run and no longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from vllm.config import CompilationConfig, KernelConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from semkv_rag.connector.worker.model.eager_kernels import EagerKernels
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside
from workbench.kernels_used import used, watch


def made(mode: CompilationMode, *custom_ops: str) -> tuple[nn.Module, VllmConfig]:
    """A model of a norm and an activation."""
    base = "all" if mode == CompilationMode.NONE else "none"
    config = VllmConfig(
        compilation_config=CompilationConfig(mode=mode, custom_ops=[base, *custom_ops])
    )
    with set_current_vllm_config(config):
        return nn.Sequential(RMSNorm(8), SiluAndMul()), config


def methods(model: nn.Module) -> list[str]:
    return [layer._forward_method.__name__ for layer in model]


def test_layers_use_their_kernels_inside_the_block() -> None:
    model, config = made(CompilationMode.DYNAMO_TRACE_ONCE)
    kernels = EagerKernels(model, config)
    assert methods(model) == ["forward_native"] * 2
    with kernels.used():
        assert methods(model) == ["forward_cpu"] * 2
    assert methods(model) == ["forward_native"] * 2


def test_they_are_left_when_a_forward_fails() -> None:
    model, config = made(CompilationMode.DYNAMO_TRACE_ONCE)
    with pytest.raises(KeyError), EagerKernels(model, config).used():
        raise KeyError
    assert methods(model) == ["forward_native"] * 2


def test_what_its_user_turned_off_stays_off() -> None:
    model, config = made(CompilationMode.DYNAMO_TRACE_ONCE, "-rms_norm")
    with EagerKernels(model, config).used():
        assert methods(model) == ["forward_native", "forward_cpu"]


def test_a_model_that_is_not_compiled_is_left_alone() -> None:
    model, config = made(CompilationMode.NONE, "-rms_norm")
    with EagerKernels(model, config).used():
        assert methods(model) == ["forward_native", "forward_cpu"]


@pytest.mark.parametrize("named", [[], ["b"]])
def test_operations_are_done_as_without_compiling(
    monkeypatch: pytest.MonkeyPatch, named: list[str]
) -> None:
    """As on CUDA, where a compiled model has its norms done natively and others by a kernel."""
    model, config = made(CompilationMode.DYNAMO_TRACE_ONCE)
    config.kernel_config = KernelConfig(
        ir_op_priority=IrOpPriorityConfig(rms_norm=[*named, "native"])
    )

    def chosen(config: VllmConfig) -> IrOpPriorityConfig:
        compiles = config.compilation_config.mode != CompilationMode.NONE
        return IrOpPriorityConfig.with_default(["native"] if compiles else ["kernel", "native"])

    monkeypatch.setattr(current_platform, "get_default_ir_op_priority", chosen)
    priority = EagerKernels(model, config)._priority
    assert priority is not None
    assert priority.rms_norm == [*named, "kernel", "native"]


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["qwen3", "gemma3_sliding"])
def test_a_compiled_engine(arch: str, engines: Engines, tiny_model: Callable[[str], Path]) -> None:
    tokens = [random_tokens(seed, 60 + seed) for seed in range(3)]
    prompt = [*random_tokens(99, 16), *tokens[2], *tokens[0], *random_tokens(77, 16)]
    with engines.own(tiny_model(arch)) as eager:
        store_chunks(eager, tokens, namespace="default")
        expected = blended(eager, prompt, ratio=0.2)
        right = plain(eager, prompt)
    with engines.own(tiny_model(arch), enforce_eager=False) as compiled:
        assert compiled.gate.servable, compiled.gate.reason
        store_chunks(compiled, tokens, namespace="default")
        inside(compiled, watch)
        assert_same(blended(compiled, prompt, ratio=0.2), expected)
        forwards, now = inside(compiled, used)
        assert forwards
        assert {tuple(names) for names in forwards} == {("forward_cpu",)}
        assert tuple(now) == ("forward_native",)
        compiled.reset_prefix_cache()
        assert_same(plain(compiled, prompt), right)
        compiled.reset_prefix_cache()
        assert_same(blended(compiled, prompt, ratio=1.0), right)
