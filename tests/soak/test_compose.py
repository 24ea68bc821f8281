"""The processes of the compose file, without containers: PostgreSQL, an S3 server, and `semkv serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_files import compose
from tests.store.shared import environment
from workbench import postgres, s3
from workbench.starts import program

pytestmark = [pytest.mark.soak, pytest.mark.engine]

START_S = 300.0
KEY, OPERATOR = "key-of-the-first-tenant", "key-of-the-operator"


def test_the_server_of_compose_answers_with_reuse(reader: Path, tmp_path: Path) -> None:
    service = compose()["services"]["semkv"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "keys").write_text(json.dumps({KEY: "first"}))
    (tmp_path / "operator_key").write_text(OPERATOR)
    bucket = s3.shared().bucket()
    with postgres.shared().schema() as index_url:
        told = {"MODEL": str(reader), "CACHE_BYTES": "1GB"}
        places = {
            "/run/secrets": str(tmp_path),
            "/cache": str(tmp_path / "cache"),
            "s3://semkv/": f"s3://{bucket}/",
            "0.0.0.0": "127.0.0.1",  # noqa: S104 - this machine's own
            "--port=8000": f"--port={port}",
        }
        command = ["semkv", "serve"]
        for word in service["command"]:
            word = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: told[found[1]], word)
            for there, here in places.items():
                word = word.replace(there, here)
            command.append(word)
        assert "SEMKV_INDEX_URL" in service["environment"]
        own = {**environment(s3.shared().endpoint), "SEMKV_INDEX_URL": index_url}
        assert own.keys() >= service["environment"].keys()
        small = ["--dtype", "float32", "--kv-cache-memory-bytes", str(256 << 20)]
        with program():
            ask_it(command + small, own, port, tmp_path / "log")


def ask_it(command: list[str], own: dict[str, str], port: int, log: Path) -> None:
    program_ = str(Path(sys.executable).parent / command[0])
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program_, *command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own},
        ) as server,
    ):
        try:
            root = f"http://127.0.0.1:{port}"
            until = time.monotonic() + START_S
            while True:
                try:
                    if httpx.get(f"{root}/ready", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert server.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(0.5)
            tenant = {"X-API-Key": KEY}
            chunks = ["the mascot of Mir bol is a red fox . the team plays near the river ."] * 2
            stored = httpx.post(
                f"{root}/semkv/v1/precompute",
                json={"documents": [{"name": "clubs", "chunks": chunks[:1]}]},
                headers=tenant,
                timeout=60,
            )
            assert '"failures": []' in stored.text
            asked = {"model": command[2], "prompt": f"{chunks[0]} who ?", "max_tokens": 2}
            answer = httpx.post(f"{root}/v1/completions", json=asked, headers=tenant, timeout=60)
            assert answer.json()["kv_transfer_params"]["semkv"]["kv_cache"] == "hit"
            assert httpx.get(f"{root}/metrics", headers=tenant, timeout=9).status_code == 403
            operator = {"Authorization": f"Bearer {OPERATOR}"}
            told = httpx.get(f"{root}/metrics", headers=operator, timeout=9).text
            assert 'semkv_requests_total{engine="0"' in told
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) in (0, 130, 143, -signal.SIGTERM)
