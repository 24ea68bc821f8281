"""Rules that others have published: at the check layer, too, only picked tokens are fresh."""

from __future__ import annotations

from torch import Tensor

from semkv_rag.blend import Candidates, Selector


class PublishedKVDeviation(Selector):
    """CacheBlend (arXiv 2405.16444, section 4.3)."""

    needs_check_layer = True

    def scores(self, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


class PublishedKDeviation(PublishedKVDeviation):
    """LMCache's blender: keys alone are compared."""

    def deviation(
        self, keys: Tensor, values: Tensor, stored_keys: Tensor, stored_values: Tensor
    ) -> Tensor:
        return (keys.float() - stored_keys.float()).square().flatten(1).sum(1)


PUBLISHED = {
    "kv_deviation_published": PublishedKVDeviation,
    "k_deviation_published": PublishedKDeviation,
}
