"""Who may ask for what: the rule for API keys and namespaces.

A key belongs to a tenant, who has a namespace of its own, or to the operator. A tenant may use the routes
that concern itself alone. All other routes are the operator's, those that a later vLLM adds included. If
there are no keys, there is one tenant, who is also the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from semkv_rag.config import DEFAULT_NAMESPACE, ReuseOptions, check_namespace
from semkv_rag.errors import OptionError

OWN = "/semkv/v1/"
"""Where the server's own routes are."""

OPEN = frozenset({"/health", "/ping"})
"""Whether the server lives: for load balancers, which have no key."""

CONSOLE_PAGE = OWN + "console"
CONSOLE = CONSOLE_PAGE + "/"
"""The console's page, which holds nothing and which anybody may load, and what it asks for."""

READY = "/ready"
"""Whether it answers with reuse: likewise without a key."""

OF_TENANTS = frozenset(
    {
        "/classify",
        "/detokenize",
        "/generative_scoring",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/realtime",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
        "/version",
        *(OWN + name for name in ("info", "precompute", "forget", "outcome")),
        *(CONSOLE + name for name in ("state", "documents", "request", "change")),
    }
)
"""What a tenant may ask for: routes that answer the one who asks and tell of nobody else."""


@dataclass(frozen=True)
class Tenancy:
    """The server's rule for keys and namespaces.

    Attributes:
        namespace: of the operator's requests, and of all where there are no keys.
        by_api_key: tenants' namespaces by the digest of their key.
        operator_keys: digests of the operator's keys.
        trust_request: whether a request may name its namespace itself.
        reuse: the options of requests that bring none.
    """

    namespace: str = DEFAULT_NAMESPACE
    by_api_key: Mapping[bytes, str] = field(default_factory=dict)
    operator_keys: frozenset[bytes] = frozenset()
    trust_request: bool = False
    reuse: ReuseOptions = field(default_factory=ReuseOptions)

    @classmethod
    def of_keys(
        cls,
        namespace: str,
        api_keys: Mapping[str, str],
        operator_keys: Iterable[str] = (),
        *,
        trust_request: bool,
        reuse: ReuseOptions,
    ) -> Tenancy:
        """The rule for keys in plain text.

        Raises:
            OptionError: a key is empty or stands for two, or a namespace cannot be one.
        """
        operators = list(operator_keys)
        for key in (*api_keys, *operators):
            if not key or not key.isprintable() or key != key.strip():
                raise OptionError(
                    "an API key is empty or holds blanks at its ends or what cannot be printed"
                )
        if both := set(api_keys) & set(operators):
            raise OptionError(f"{len(both)} API keys are a tenant's and the operator's: use others")
        return cls(
            check_namespace(namespace),
            {key_digest(key): check_namespace(name) for key, name in api_keys.items()},
            frozenset(map(key_digest, operators)),
            trust_request,
            reuse,
        )

    @property
    def wants_key(self) -> bool:
        """Whether there are keys at all."""
        return bool(self.by_api_key or self.operator_keys)

    def knows(self, key: str | None) -> bool:
        """Whether whoever shows this key is let in."""
        if not self.wants_key:
            return True
        digest = None if key is None else key_digest(key)
        return digest in self.by_api_key or digest in self.operator_keys

    def allows(self, key: str | None, path: str) -> bool:
        """Whether whoever shows this key, which is known, may ask for this path.

        Args:
            path: as the server's router sees it.
        """
        tenant = key is not None and key_digest(key) in self.by_api_key
        return not tenant or path in OF_TENANTS or path in OPEN

    def namespace_of(self, key: str | None, wished: Any = None) -> str:
        """Whose chunks a request is about; `wished` is what it says itself, or None.

        Raises:
            OptionError: it may not say so, or it cannot be a namespace.
        """
        own = self.by_api_key.get(key_digest(key)) if key else None
        return self.agreed(own or self.namespace, wished)

    def agreed(self, own: str, wished: Any) -> str:
        """The namespace of a request that would be `own`, and says `wished` itself, or None.

        Raises:
            OptionError: as `namespace_of`.
        """
        if wished is None or wished == own:
            return own
        if not self.trust_request:
            raise OptionError("the namespace comes from the server, not from the request")
        return check_namespace(wished)


def key_digest(key: str) -> bytes:
    """What is kept of an API key. Digests are compared, so that times tell nothing of a key."""
    return blake3(key.encode("utf-8", "surrogatepass")).digest()
