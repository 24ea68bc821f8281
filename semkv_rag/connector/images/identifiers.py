"""How a request's image is named once its features may be reused.

vLLM names an image by the hash of its content, or by a name that its client gives. For a request that
wants reuse, the KV connector's scheduler half replaces it by a name of ours, with the state's namespace
and key. The encoder-cache connector loads and saves only images with such a name. Both connectors'
scheduler halves live in one process, and a name is signed with a secret of that process. So a client
cannot make up a name of this form that is taken for ours.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from blake3 import blake3

_SECRET = secrets.token_bytes(32)
_MARK = "semkv-state"


@dataclass(frozen=True)
class StateRef:
    """Which features an image stands for.

    Attributes:
        namespace: whose it is.
        key: the image's own state, 64 hex digits: it is saved under this key only.
        donor_key: the state of another image that may stand in for it; None where none may.
        save: whether the image's state is stored once it was computed.
    """

    namespace: str
    key: str
    donor_key: str | None = None
    save: bool = True


def state_identifier(
    namespace: str, key: str, donor_key: str | None = None, *, save: bool = True
) -> str:
    """The name that an image of a request gets in place of vLLM's own.

    Args:
        namespace: the request's.
        key: of the image, from `semkv_rag.reuse.image_key` of vLLM's identifier.
        donor_key: of another image whose state may be taken instead.
        save: whether the image's state is stored once it was computed.
    """
    named = f"{key}:{donor_key or ''}:{'save' if save else ''}:{namespace}"
    return f"{_MARK}:{_signature(named)}:{named}"


def parse_identifier(text: str) -> StateRef | None:
    """What a name made by `state_identifier` in this process says; None for any other text."""
    mark, _, rest = text.partition(":")
    signature, _, named = rest.partition(":")
    if mark != _MARK or not secrets.compare_digest(
        signature.encode("utf-8", "surrogatepass"), _signature(named).encode()
    ):
        return None
    key, donor_key, save, namespace = named.split(":", 3)
    return StateRef(namespace, key, donor_key or None, bool(save))


def _signature(named: str) -> str:
    return blake3(named.encode("utf-8", "surrogatepass"), key=_SECRET).hexdigest()
