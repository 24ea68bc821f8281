"""Where the packages start programs, open files, run code, unpickle and use the network: nowhere else."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.settings import ROOT

MODULES = {
    *("subprocess", "pty", "multiprocessing", "asyncio.subprocess"),
    *("importlib", "imp", "pkgutil", "runpy", "code", "codeop", "ctypes", "cffi"),
    *("pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"),
    *("socket", "socketserver", "ssl", "http", "urllib.request", "urllib3", "requests"),
    *("httpx", "aiohttp", "ftplib", "smtplib", "telnetlib", "xmlrpc"),
    *("tempfile", "mmap"),
}
"""Every use of a name from these counts."""

NAMES = {
    *("eval", "exec", "compile", "__import__", "open", "input", "breakpoint"),
    *("os.system", "os.popen", "os.fork", "os.forkpty", "os.startfile", "os.open", "os.fdopen"),
    *("os.chmod", "os.chown", "os.umask", "os.mkfifo", "os.putenv", "os.kill", "os.killpg"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *("asyncio.open_connection", "asyncio.start_server", "asyncio.start_unix_server"),
    *("io.open", "io.open_code", "io.FileIO", "codecs.open", "gzip.open", "bz2.open", "lzma.open"),
    *("zipfile.ZipFile", "tarfile.open", "tarfile.TarFile", "sqlite3.connect", "shutil.rmtree"),
    *("torch.load", "torch.save", "torch.hub.load", "torch.jit.load", "torch.from_file"),
    *("numpy.load", "numpy.save", "numpy.savez", "numpy.memmap", "numpy.fromfile"),
    *("numpy.loadtxt", "numpy.genfromtxt", "pandas.read_pickle", "faiss.read_index"),
    *("pypdf.PdfReader", "sentence_transformers.SentenceTransformer"),
}
"""Functions that count by themselves; those of a name without a module are Python's own."""

PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn")

METHODS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "chmod"),
    *("update_mmap", "savefig", "tofile"),
}
"""Of whatever object: a path's, most of the time."""

KEYWORDS = {
    *("shell", "allow_pickle", "weights_only", "trust_remote_code"),
    "allow_dangerous_deserialization",
}
"""Arguments that make a call dangerous, or stop it from being that."""

ALLOWED: dict[str, dict[str, str]] = {
    # What the user names on the command line or hands in.
    "semkv_rag/cli/__init__.py": {"importlib.metadata.version": "this package's own; a fixed name"},
    "semkv_rag/cli/precompute.py": {
        ".read_text": "the user's --prefix-file",
        "tempfile.TemporaryDirectory": "an empty store for a dry run that finds none",
    },
    "semkv_rag/cli/doctor.py": {
        ".write_text": "what was found, where the user wants it",
        "tempfile.TemporaryDirectory": "a store for the deep checks, beside the user's",
    },
    "semkv_rag/cli/ask.py": {".write_text": "a token map, where the user wants it"},
    "semkv_rag/cli/explain.py": {".write_text": "a token map, where the user wants it"},
    "semkv_rag/cli/stats.py": {
        "httpx.get": "the metrics of the server that the user names",
        "httpx.HTTPError": "the same",
    },
    "semkv_rag/cli/plan.py": {
        ".read_text": "what the user's doctor measured; JSON",
        "tempfile.TemporaryDirectory": "a store for --measure",
    },
    "semkv_rag/cli/quality.py": {
        "tempfile.TemporaryDirectory": "a store for copies under the codecs that are compared",
        ".read_text": "the user's system prompt and template",
        ".write_text": "the report, where the user wants it",
    },
    "semkv_rag/cli/serve.py": {".read_text": "the operator's file of API keys; JSON"},
    "semkv_rag/corpus/prompt_file.py": {".read_text": "the user's file of prompts; JSON lines"},
    "semkv_rag/corpus/opening.py": {
        "os.open": "the user's documents: regular files of the folder that was given",
        "os.fdopen": "the same",
    },
    "semkv_rag/corpus/pdf_process.py": {"pypdf.PdfReader": "the user's documents, within bounds"},
    "semkv_rag/corpus/pdf_text.py": {
        "subprocess.run": "our own program, which reads a PDF in bounds that the system keeps",
        "subprocess.PIPE": "its answer; JSON",
        "subprocess.DEVNULL": "what pypdf says of broken files",
    },
    "semkv_rag/connector/capture_results.py": {
        "tempfile.TemporaryDirectory": "a folder of this user's for the socket",
        "socket.socket": "workers of this machine tell what became of captures; JSON",
        "socket.AF_UNIX": "the same",
        "socket.SOCK_DGRAM": "the same",
    },
    "semkv_rag/connector/adapter.py": {
        ".read_text": "the configuration of an adapter of the operator's, which vLLM loads; JSON"
    },
    "semkv_rag/connector/cores.py": {".read_text": "the system's names of processes, under /proc"},
    "semkv_rag/known_fingerprints.py": {
        "importlib.metadata.version": "of packages with fixed names",
        "importlib.metadata.PackageNotFoundError": "the same",
        ".read_text": "the user's own cache; JSON, of which only digests are taken",
        ".write_text": "the same",
    },
    "semkv_rag/on_ray/cores.py": {
        "os.open": "empty files that stand for cores, in a folder of the user's own; locked, never read",
        "tempfile.gettempdir": "where that folder is",
    },
    "semkv_rag/on_ray/cluster.py": {
        "socket.create_connection": "whether anybody listens at the user's --ray-address",
    },
    "semkv_rag/quality/journal.py": {".open": "the user's --resume file; JSON lines, checked"},
    "semkv_rag/quality/questions.py": {".read_text": "the user's file of questions; JSON"},
    "semkv_rag/quality/plot.py": {
        "importlib.util.find_spec": "whether matplotlib is installed; a fixed name",
        ".savefig": "the plot, where the user wants it",
    },
    "semkv_rag/__init__.py": {"importlib.import_module": "our own modules, by fixed names"},
    # What the program itself registers, or an installed package offers; no request names a class.
    "semkv_rag/selectors.py": {
        "importlib.import_module": "a selector's class",
        "importlib.metadata.entry_points": "installed packages' selectors",
    },
    # The store.
    "semkv_rag/store/files/beneath.py": {
        "os.open": "all of the store's files: regular ones, through no link below the root"
    },
    "semkv_rag/store/files/tensor_file.py": {
        "open": "a descriptor of beneath.py's",
    },
    "semkv_rag/store/files/tensor_writer.py": {
        "open": "its own new file's descriptor",
        "os.open": "a new file in a folder of the store, through no link",
    },
    "semkv_rag/store/identity.py": {"os.fdopen": "likewise"},
    "semkv_rag/store/objects/cache.py": {
        "os.open": "a new file in a folder of the store, through no link",
    },
    "semkv_rag/store/objects/shared_files.py": {
        "os.fdopen": "a descriptor of beneath.py's",
        ".open": "its own new file, in a folder of its own",
        "tempfile.TemporaryDirectory": "a file that the local folder does not take, until it is sent",
    },
    "semkv_rag/store/index/sqlite.py": {
        "sqlite3.connect": "the index; SQL with parameters",
        "os.fdopen": "a journal's last bytes, by a descriptor of beneath.py's",
    },
    # Pages and styles that come with the package.
    "semkv_rag/server/console.py": {
        "importlib.resources.files": "the console's page; a fixed name",
        ".read_text": "the same",
    },
    "semkv_rag/token_map/html.py": {
        "importlib.resources.files": "a token map's style; a fixed name",
        ".read_text": "the same",
    },
    # The engine.
    "semkv_rag/engine/openai_answers.py": {".open": "a chat's stream, no file"},
    "semkv_rag/connector/fingerprint.py": {
        ".read_text": "digests of model files, in the user's own cache; JSON",
        ".write_text": "the same",
        ".update_mmap": "the model's files, to take their digest",
    },
    "semkv_rag/connector/orphan.py": {
        "multiprocessing.parent_process": "to end when the parent has",
        "multiprocessing.connection.wait": "the same",
    },
    # What comes with a package, and what is installed.
    "semkv_rag/prompt_cache/vectors/encoders.py": {
        "sentence_transformers.SentenceTransformer": "a folder's model, without trust_remote_code",
    },
    "semkv_rag/prompt_cache/guard/lexicon.py": {
        "importlib.resources.files": "our own word lists",
        ".read_text": "our own word lists; TOML",
    },
    "semkv_rag/cli/checks.py": {
        "importlib.import_module": "two fixed names: whether transformers and vLLM can be imported",
        "importlib.metadata.PackageNotFoundError": "an error",
        "importlib.metadata.version": "versions of installed packages",
        "tempfile.TemporaryDirectory": "a store for a trial start",
        "tempfile.TemporaryFile": "whether the store can be written",
    },
    "integrations/llama-index-llms-semkv/llama_index/llms/semkv/routing.py": {
        "multiprocessing.connection.Client": "to the window, with the process's key",
        "multiprocessing.connection.Connection": "JSON as bytes: send and recv, which pickle, are unused",
        "multiprocessing.connection.Listener": "the window; children have its key, its folder is private",
        "multiprocessing.current_process": "the key",
    },
}
"""By file and call, why the call is there: what it reads, writes or runs, and who says so."""


def packages() -> Iterator[Path]:
    """The files of the packages that users install."""
    yield from sorted((ROOT / "semkv_rag").rglob("*.py"))
    for file in sorted((ROOT / "integrations").rglob("*.py")):
        if "tests" not in file.relative_to(ROOT).parts:
            yield file


def dangerous_calls(source: str) -> dict[str, int]:
    """The calls in a file that count, each with the line of the first.

    A function that is only handed on (`map(eval, …)`) counts as called.
    """
    tree = ast.parse(source)
    names = _imported(tree)
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(keywords=keywords):
                said = [f"{word.arg}=" for word in keywords if word.arg in KEYWORDS]
            case ast.Name() | ast.Attribute():
                said = [name for name in [_counting(node, names)] if name is not None]
            case _:
                continue
        for call in said:
            found[call] = min(node.lineno, found.get(call, node.lineno))
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    """What the names that a file imports stand for, in full."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _counting(node: ast.Name | ast.Attribute, names: dict[str, str]) -> str | None:
    """The name of a dangerous function, in full, or None."""
    name = _full_name(node, names)
    if name is not None:
        parts = name.split(".")
        parents = {".".join(parts[:count]) for count in range(1, len(parts))}
        if name in NAMES or parents & MODULES or name.startswith(PREFIXES):
            return name
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        return name or f".{node.attr}"
    return None


def _full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """`np.load` → `numpy.load`; None for what hangs on no import and is not Python's own."""
    match node:
        case ast.Name(id=name):
            return names.get(name) or (name if hasattr(builtins, name) else None)
        case ast.Attribute(value=value, attr=attr):
            before = _full_name(value, names)
            return None if before is None else f"{before}.{attr}"
    return None


@pytest.mark.slow
def test_dangerous_calls_stand_where_they_are_known() -> None:
    found = {
        str(path.relative_to(ROOT)): dangerous_calls(path.read_text(encoding="utf-8"))
        for path in packages()
    }
    new = [
        f"{path}:{line} uses {call}"
        for path, calls in found.items()
        for call, line in calls.items()
        if call not in ALLOWED.get(path, {})
    ]
    assert not new, (
        "Can it be done by what is there already (semkv_rag/store/files/tensor_file.py)? "
        "If not: check whose names and bytes it takes, and enter the call with the reason in "
        f"ALLOWED, {Path(__file__).relative_to(ROOT)}."
    )
    gone = [
        f"{path} no longer uses {call}: take it out of ALLOWED"
        for path, calls in ALLOWED.items()
        for call in calls
        if call not in found.get(path, {})
    ]
    assert not gone


def test_every_known_place_has_a_reason() -> None:
    assert all(reason.strip() for calls in ALLOWED.values() for reason in calls.values())


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("import subprocess as s\ns.run(['ls'])", {"subprocess.run"}),
        ("from subprocess import Popen as P\nP(['ls'], shell=True)", {"subprocess.Popen", "shell="}),
        ("import os\nos.system('ls'); os.execvp('ls', []); os.spawnl(0, 'ls')", {
            "os.system", "os.execvp", "os.spawnl"}),
        ("import os\nos.path.join('a', 'b'); os.replace('a', 'b')", set()),
        ("open('a'); list(map(eval, []))", {"open", "eval"}),
        ("import re\nre.compile('a'); model.eval()", set()),
        ("def f(path): return path.read_text() + path.open().read()", {".read_text", ".open"}),
        ("from pathlib import Path\nread = Path.read_bytes", {"pathlib.Path.read_bytes"}),
        ("import numpy as np\nnp.load('a', allow_pickle=True)", {"numpy.load", "allow_pickle="}),
        ("import torch\ntorch.load('a', weights_only=True)", {"torch.load", "weights_only="}),
        ("def f():\n    import pickle\n    return pickle.loads", {"pickle.loads"}),
        ("from importlib import import_module as i\ni('os')", {"importlib.import_module"}),
        ("from multiprocessing.connection import Client\nClient('a')", {
            "multiprocessing.connection.Client"}),
        ("load(trust_remote_code=True)", {"trust_remote_code="}),
    ],
)  # fmt: skip
def test_the_search_finds(source: str, calls: set[str]) -> None:
    assert set(dangerous_calls(source)) == calls
