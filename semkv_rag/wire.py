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
"""In our params: this request's prompt is to be captured. Only the engine's own process sets it.

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
"""In our params: images, by key, that are taken for a stored one, whose key it gives."""

ANSWER_TOKENS_KEY = "answer_tokens"
"""In our params: how many tokens at the prompt's end are an answer to it, whose log-probabilities are
asked for. All that stands before is planned as though it came alone."""

STORE_IMAGES_KEY = "store_images"
"""In our params: whether the features of this request's images are stored. Only the engine's own
process sets it, as it does with `near_images`."""

OURS_ALONE = frozenset(
    {"namespace", CAPTURE_KEY, NEAR_IMAGES_KEY, ANSWER_TOKENS_KEY, STORE_IMAGES_KEY}
)
"""In our params: what only the engine's own process may set, and a client of another server may not."""
