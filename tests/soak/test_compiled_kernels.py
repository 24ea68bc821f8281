"""Our Triton kernels compile for GPUs that are not here, for shapes of well-known models, in bfloat16."""

from __future__ import annotations

import pytest

from workbench.interpreted import with_triton

pytestmark = [pytest.mark.soak]


@pytest.mark.parametrize("capability", ["80", "89", "90", "100"])
def test_they_compile_and_fit(capability: str) -> None:
    printed = with_triton("-m", "workbench.compiled_kernels", capability, timeout_s=900)
    assert printed.count("loading") == printed.count("attention of rows") == 6, printed
