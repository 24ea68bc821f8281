"""An image's own features as its vector: no model is needed but the one that is served."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sampling_params import RequestOutputKind

from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.engine.client import CAPTURE_PREFIX, ReportingLLM
from semkv_rag.engine.image_inputs import images_of
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.errors import EngineError
from semkv_rag.prompt_cache.normalise import pixels_key
from semkv_rag.prompt_cache.vectors.encoders import Reads
from semkv_rag.prompt_cache.vectors.index import Vectors, normalised
from semkv_rag.store import state_id
from semkv_rag.wire import PARAMS_KEY, STORE_IMAGES_KEY, TRANSFER_FIELD

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageFeatureEncoder:
    """The mean of an image's features over its rows.

    For an image whose state is not stored the vision tower runs, once: the state is stored, and the
    request that holds the image loads it. Means of all images have much in common: choose the layer's
    threshold by what near and other images have.
    """

    name = "fusion-state"
    reads: Reads = "image"

    def __init__(self) -> None:
        self._llm: ReportingLLM | None = None
        self._capturer: LLMCapturer | None = None
        self._placeholder = ""
        self._ids = itertools.count()

    def bind(self, llm: ReportingLLM, capturer: LLMCapturer) -> None:
        """Called once, when the engine is there."""
        self._llm, self._capturer = llm, capturer
        inputs = MULTIMODAL_REGISTRY.create_processor(llm.model_config).dummy_inputs
        self._placeholder = inputs.get_dummy_text({"image": 1})

    def encode(self, items: Sequence[Any]) -> Vectors:
        """[n, width] float32 of n images, each of length 1; states go to the default namespace.

        Raises:
            EngineError: there is no engine, or it could not compute or store a state.
        """
        made = [self.encode_image(item, DEFAULT_NAMESPACE, pixels_key(item)) for item in items]
        return np.concatenate(made)

    def encode_image(self, image: Image, namespace: str, key: str) -> Vectors:
        """[1, width] float32, of length 1.

        Args:
            namespace: where the state is stored.
            key: the image's, see `semkv_rag.reuse.image_key`.

        Raises:
            EngineError: there is no engine, or it could not compute or store the state.
        """
        if self._llm is None or self._capturer is None:
            raise EngineError(
                "a ImageFeatureEncoder works in an engine: give it to one as an encoder"
            )
        states, model = self._capturer.store.states, self._capturer.fingerprint
        state = states.load(model, namespace, key)
        if state is None:
            own = self._capturer.submit(self._compute(image, namespace)).result()
            state = states.load(model, namespace, own)
            if state is None:
                raise EngineError("the engine has not stored the image's features")
            states.put(model, namespace, key, state)
            states.remove([state_id(model, namespace, own)])
        return normalised(state.float().numpy().mean(axis=0, keepdims=True))

    async def _compute(self, image: Image, namespace: str) -> str:
        """Have the engine compute and store an image's state; the key that it is stored under.

        The image gets a name of its own: vLLM sends an image that it was given before without its
        pixels, and the request that this is for may have been rendered but not sent.
        """
        assert self._llm is not None
        wishes = {"namespace": namespace, STORE_IMAGES_KEY: True}
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={TRANSFER_FIELD: {PARAMS_KEY: wishes}},
        )
        rendered = await self._llm.render(
            {
                "prompt": self._placeholder,
                "multi_modal_data": {"image": [image]},
                "multi_modal_uuids": {"image": [f"semkv-{secrets.token_hex(16)}"]},
            }
        )
        request_id = f"{CAPTURE_PREFIX}state-{next(self._ids)}"
        async for _ in self._llm.generate(rendered, params, request_id):
            pass
        await self._llm.collective_rpc("semkv_flush_states")
        (seen,) = images_of(rendered)
        return seen.key
