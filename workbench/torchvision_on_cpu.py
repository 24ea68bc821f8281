"""Have torchvision's build for CUDA imported beside PyTorch's build for the CPU.

Its own operators cannot be loaded there, and importing it asks for the schemas of two of them. Processors
of images need none: they resize by PyTorch's operators.

`python -m workbench.torchvision_on_cpu FOLDER` changes the torchvision that pip has put into a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCHEMAS = """

if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def add_schemas(folder: Path) -> None:
    """Add the schemas to `folder`'s torchvision.

    Raises:
        FileNotFoundError: there is none.
    """
    extension = folder / "torchvision" / "extension.py"
    text = extension.read_text()
    if not text.endswith(SCHEMAS):
        extension.write_text(text + SCHEMAS)


if __name__ == "__main__":
    add_schemas(Path(sys.argv[1]))
