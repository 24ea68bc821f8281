"""What became of each token of a prompt: as values, as HTML (`html`), and for a terminal (`terminal`)."""

from semkv_rag.token_map.records import Kind, MappedSpan, TokenMap

__all__ = ["Kind", "MappedSpan", "TokenMap"]
