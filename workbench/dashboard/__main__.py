"""python -m workbench.dashboard MODEL [--seconds 300]: docs/images/dashboard.png, from a real run.

`semkv serve` answers requests of every kind, Prometheus asks it for its metrics, and the dashboard's
panels are drawn from what Prometheus then answers to their queries.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from workbench.articles import article_pieces
from workbench.dashboard.load import STORED, Load
from workbench.dashboard.panels import curves, draw, panels
from workbench.dashboard.prometheus import Prometheus
from workbench.server import Server
from workbench.settings import ROOT

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
CHUNK_TOKENS = 100
LIMIT_BYTES = 24 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    pieces = article_pieces(tokenizer, 4 * STORED, CHUNK_TOKENS)
    chunks = [str(tokenizer.decode(piece)) for piece in pieces]
    with tempfile.TemporaryDirectory() as name, Server(arguments.model, Path(name)) as server:
        target = server.base_url.removeprefix("http://").removesuffix("/v1")
        (Path(name) / "prometheus").mkdir()
        with Prometheus(Path(name) / "prometheus", target, server.operator_key) as prometheus:
            begin = time.time()
            Load(server, chunks, LIMIT_BYTES).run(arguments.seconds)
            end = time.time()
            shown = [(panel, curves(panel, prometheus, begin, end)) for panel in panels()]
    draw(shown, end - begin, PICTURE)


if __name__ == "__main__":
    main()
