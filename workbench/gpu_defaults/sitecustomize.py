"""On PYTHONPATH: vLLM on a CPU has the defaults that it has on a GPU, for `make second-runner`.

* Its second model runner, whose Triton kernels run in Triton's interpreter (`TRITON_INTERPRET=1`). vLLM
  wants a Triton with a backend for CPUs before it believes in Triton; the interpreter needs none.
* Asynchronous scheduling, which vLLM's platform for CPUs switches off.

Python imports a module of this name in each process as it starts, so vLLM's processes are reached, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def _add_cpu_backend(backends: Any) -> None:
    driver = SimpleNamespace(is_active=lambda: False)
    backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def _leave_scheduling_alone(platform: Any) -> None:
    check = platform.CpuPlatform.check_and_update_config.__func__

    def check_all_else(kind: type, config: Any) -> None:
        scheduling = config.scheduler_config.async_scheduling
        check(kind, config)
        config.scheduler_config.async_scheduling = scheduling

    platform.CpuPlatform.check_and_update_config = classmethod(check_all_else)


PATCHES: dict[str, Callable[[Any], None]] = {
    "triton.backends": _add_cpu_backend,
    "vllm.platforms.cpu": _leave_scheduling_alone,
}


class _Patching(importlib.abc.MetaPathFinder):
    """Patches a module right behind its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            PATCHES[name](module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Patching())
