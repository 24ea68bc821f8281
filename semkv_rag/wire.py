"""Keys of what travels in a request and its answer, between clients, servers and the connector.

A request's options come in `kv_transfer_params["semkv"]`; its report leaves the same way. Usable without
vLLM.
"""

from typing import TypeAlias

TRANSFER_FIELD = "kv_transfer_params"
"""The field of OpenAI's requests and answers that carries our params and our report."""

PARAMS_KEY = "semkv"
"""Our key in a request's `kv_transfer_params`, on the way in and on the way out."""

CAPTURE_KEY = "capture"
"""The key in our params that has this request's prompt captured. Only the engine's own process sets it.

With `in_passing` it is a caller's request, which is served with reuse where that is possible, and then
not captured, unless `behind_exact` is set and all that is reused is exact and the beginning of the
prompt. Without, it is there for the capture alone.
"""

CAPTURED_KEY = "captured"
"""Beside the report, on its way to the engine's own process: the request was captured."""

TIMES_KEY = "times"
"""Beside the report, on its way to the engine's own process: `Times`."""

Times: TypeAlias = dict[str, tuple[float, float]]
"""When the parts of a request's reuse began and ended, seconds since the epoch, by name: `match`, `load`,
`pick` and `recompute`."""

COUNTED_KEY = "counted"
"""Beside the report, on its way to the engine's own process: what `ReuseStats.count` takes."""

NEAR_IMAGES_KEY = "near_images"
"""The key in our params of images taken for stored ones: the stored one's key, by the image's own."""

ANSWER_TOKENS_KEY = "answer_tokens"
"""The key in our params of how many tokens at the prompt's end are an answer to it, whose
log-probabilities are asked for. What stands before them is planned as though it came alone."""

STORE_IMAGES_KEY = "store_images"
"""The key in our params of whether the features of this request's images are stored. Only the engine's
own process sets it, as it does with `near_images`."""

OURS_ALONE = frozenset(
    {"namespace", CAPTURE_KEY, NEAR_IMAGES_KEY, ANSWER_TOKENS_KEY, STORE_IMAGES_KEY}
)
"""The keys in our params that only the engine's own process may set, and no client of a server."""
