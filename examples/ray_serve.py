"""A fleet on Ray Serve: several `semkv serve` over one store, behind one address.

    pip install 'semkv-rag[cpu]' 'ray[serve]'
    python examples/ray_serve.py --model examples/reader --store kv/ --replicas 2

Each replica starts a `semkv serve` of its own and passes requests on to it: all of its routes, options
and streams are there. Ray Serve starts the replicas, watches them, and gives a request to any of them.
What one stores, the others find: no request needs a certain replica.

What a replica takes is Ray's to give: `--cpus 1` here, `--gpus 1` on machines with GPUs. Options behind
`--` are those of `semkv serve`.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from semkv_rag.on_ray.cores import bind_engine

START_S = 900
ANSWER_S = 3600
REPLICA = "x-semkv-replica"
"""The header of an answer that says which replica gave it."""
_OF_ONE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", "host", "content-length"}


@serve.deployment(max_ongoing_requests=256, health_check_period_s=5)
class Replica:
    """One `semkv serve`.

    Args:
        command: what stands behind `semkv serve`, without a port.
        cpus: of the replica, as Ray counts them.
    """

    def __init__(self, command: Sequence[str], cpus: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        bind_engine(cpus)
        self._server = subprocess.Popen(
            [
                # It ends with this process, however this ends.
                *("setpriv", "--pdeathsig", "KILL"),
                *(sys.executable, "-m", "semkv_rag.cli", "serve", *command),
                *("--host", "127.0.0.1", "--port", str(port)),
            ]
        )
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while not _answers(url):
            if self._server.poll() is not None or time.monotonic() > until:
                self._server.kill()
                raise RuntimeError("semkv serve did not start: its output is in the replica's log")
            time.sleep(0.2)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._client = httpx.AsyncClient(base_url=url, timeout=ANSWER_S)

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = [(k, v) for k, v in request.headers.items() if k not in _OF_ONE_CONNECTION]
        asked = self._client.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=headers,
            content=await request.body(),
        )
        answer = await self._client.send(asked, stream=True)
        given = {k: v for k, v in answer.headers.items() if k not in _OF_ONE_CONNECTION}
        return StreamingResponse(_parts(answer), answer.status_code, {**given, REPLICA: self._name})

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when its server has ended or does not answer."""
        (await self._client.get("/health", timeout=30)).raise_for_status()

    def __del__(self) -> None:
        if (server := getattr(self, "_server", None)) is not None:
            server.terminate()
            server.wait()


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:  # also when the client went away: then the server stops, too
        await answer.aclose()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def fleet(
    command: Sequence[str], *, replicas: int, cpus: float = 1.0, gpus: float = 0.0
) -> serve.Application:
    """Replicas of `semkv serve`, for `serve.run`.

    Args:
        command: what stands behind `semkv serve`: the model, `--store`, and further options.
        replicas: how many.
        cpus, gpus: what each takes.
    """
    takes = {"num_cpus": cpus, "num_gpus": gpus}
    deployment = Replica.options(num_replicas=replicas, ray_actor_options=takes)
    return deployment.bind(list(command), cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description="A fleet of semkv serve on Ray Serve.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1.0, help="of a replica")
    parser.add_argument("--gpus", type=float, default=0.0, help="of a replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("options", nargs="*", help="of semkv serve, behind --")
    given = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    command = [given.model, "--store", str(given.store.resolve()), *given.options]
    serve.run(
        fleet(command, replicas=given.replicas, cpus=given.cpus, gpus=given.gpus), blocking=True
    )


if __name__ == "__main__":
    main()
