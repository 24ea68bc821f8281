"""An Azure Blob Storage server for tests: Azurite, Microsoft's own, which the Makefile fetches with npm.

Everything is in its memory. Unlike the S3 server it checks signatures.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import hmac
import http.client
import secrets
import shutil
from collections.abc import Mapping
from email.utils import formatdate
from functools import cache
from pathlib import Path
from typing import Final

from workbench.local_server import LocalServer
from workbench.settings import ROOT

ACCOUNT: Final = "devstoreaccount1"
KEY: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Azurite's only account and its key, which its documentation gives: no secret."""
FETCHED: Final = ROOT / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
_VERSION: Final = "2021-08-06"


def program() -> Path | None:
    """The server: that of `make build/azurite/.ready`, else None."""
    return FETCHED if FETCHED.exists() and shutil.which("node") else None


class AzureServer(LocalServer):
    """A server of its own, started at once; a context manager.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self) -> None:
        options = ["--inMemoryPersistence", "--silent", "--disableTelemetry"]
        super().__init__(
            "Azure", lambda port: ["node", str(FETCHED), "--blobPort", str(port), *options]
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}",
        }

    def container(self) -> str:
        """The name of a new, empty container."""
        name = f"semkv-{secrets.token_hex(8)}"
        date = formatdate(usegmt=True)
        # Azure's "Authorize with Shared Key": the method, eleven empty fields, ours, and the container.
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
        signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers = {
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            "x-ms-date": date,
            "x-ms-version": _VERSION,
            "Content-Length": "0",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
            if (status := connection.getresponse().status) != 201:
                raise RuntimeError(f"no container was made: {status}")
        finally:
            connection.close()
        return name


@cache
def shared() -> AzureServer:
    """This process's server, started when it is first asked for and stopped when the process ends."""
    server = AzureServer()
    atexit.register(server.close)
    return server
