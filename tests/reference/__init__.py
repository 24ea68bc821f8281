"""What the engine is held against: the same answers, computed with transformers and torch alone.

These files are the specification in code, so they are written to be read and take no care of
speed. From the package they use only the plain dataclasses of a reuse plan; rotation, selection and
attention are not shared with it. Models are loaded in float32 with eager attention.

    model = ReferenceModel(folder)
    model.logprobs(prompt)                          # full prefill
    stored = {"a": model.stored(context, chunk)}    # KV as computed behind a context
    model.blend(prompt, plan, stored).logprobs      # CacheBlend
    masked(model, prompt, plan, stored)             # the `none` selector, by a mask
"""

from tests.reference.block_diagonal import masked, piece_by_piece
from tests.reference.cacheblend import BlendResult, ReferenceModel
from tests.reference.images import ImageModel
from tests.reference.plain import PlainModel
from tests.reference.stored import LayerKV, StoredKV, StoringModel

__all__ = [
    "BlendResult",
    "ImageModel",
    "LayerKV",
    "PlainModel",
    "ReferenceModel",
    "StoredKV",
    "StoringModel",
    "masked",
    "piece_by_piece",
]
