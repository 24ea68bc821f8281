"""A console over an engine of the tests', with two tenants of which each has a document and a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import precompute_texts
from semkv_rag.engine import Engine
from semkv_rag.engine.recent import RecentRequests
from semkv_rag.server.console import Console
from semkv_rag.server.front import Front
from semkv_rag.server.limits import Limits
from semkv_rag.server.routes import Routes
from semkv_rag.server.tenants import Tenancy
from workbench.answers import SAMPLING

A, B = "key of a", "key of b"
EVIL = "<img src=x onerror=alert(1)>"
PREFIX = "answer by these passages :"
CHUNK = "the mascot of Mir bol is a red fox . the team plays on the old field near the river ."


@dataclass
class Served:
    """An engine whose requests are noted, and the console over it.

    Attributes:
        a: the namespace of the key `A`; `b` that of `B`.
    """

    engine: Engine
    a: str
    b: str

    def app(self, *, changes: bool = True) -> Front:
        """The layer with the console behind it, and no server behind that."""
        assert self.engine._llm is not None and self.engine._capturer is not None
        recent = self.engine._llm.recent
        assert recent is not None
        console = Console(self.engine._capturer, recent, "the model", None, changes=changes)
        tenancy = Tenancy.of_keys(
            "ours", {A: self.a, B: self.b}, trust_request=False, reuse=ReuseOptions()
        )
        about = {"obstacle": None}
        routes = Routes(tenancy, Limits(), self.engine._capturer, about, console=console)
        Front.configure(tenancy, Limits(), routes)

        async def nowhere(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("no route of vLLM's")

        return Front(nowhere)

    def ask(self, namespace: str, question: str) -> None:
        """A tenant's request, whose prompt holds its document."""
        self.engine.reset_prefix_cache()
        prompt = f"{PREFIX} {CHUNK} {question}"
        answer = self.engine.generate(
            prompt, sampling=SAMPLING, reuse=ReuseOptions(namespace=namespace)
        )
        assert answer.report.kv_cache == "hit"
        assert answer.report.token_map is None, "the caller did not ask for it"


@contextmanager
def serving(engine: Engine, a: str, b: str, evil: str = EVIL) -> Iterator[Served]:
    """The console of two namespaces of these names.

    Args:
        evil: what the names of documents begin with.
    """
    assert engine._llm is not None
    engine._llm.recent = RecentRequests()
    served = Served(engine, a, b)
    for namespace in (a, b):
        name = f"{evil} of {namespace}"
        precompute_texts(engine, [(name, [CHUNK])], namespace=namespace, prefix=PREFIX)
        served.ask(namespace, f"which mascot does {namespace} have ?")
    yield served
    engine._llm.recent = None
    Front.configure(Tenancy(), Limits(), None)
