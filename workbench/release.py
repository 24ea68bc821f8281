"""python -m workbench.release [FOLDER]: what a release consists of, in `dist/`.

Sources and wheels of the three packages, at the version that the newest tag says, and a CycloneDX SBOM of
the pinned set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from workbench.settings import ROOT

INTEGRATIONS = ("llama-index-llms-semkv", "langchain-semkv")
LOCK = ROOT / "requirements" / "cpu.lock"
SBOM = "semkv-rag.cdx.json"
TOOLS = ROOT / "build" / "sbom"
"""What `make release` installs `requirements/release.txt` into."""


def build(folder: Path) -> list[Path]:
    """Sources of each package, and of those its wheel; the wheels."""
    for source in (ROOT, *(ROOT / "integrations" / name for name in INTEGRATIONS)):
        _run("build", "--no-isolation", "--outdir", folder, source)
    return sorted(folder.glob("*.whl"))


def write_sbom(folder: Path) -> Path:
    """What `cpu.lock` pins, as CycloneDX JSON that fits its schema."""
    path = folder / SBOM
    _run(
        *("cyclonedx_py", "requirements", LOCK, "--pyproject", ROOT / "pyproject.toml"),
        *("--mc-type", "library", "--output-reproducible", "--validate", "-o", path),
    )
    return path


def _run(*command: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    folder: Path = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build(folder)
    write_sbom(folder)
    for path in sorted(folder.iterdir()):
        print(path)


if __name__ == "__main__":
    main()
