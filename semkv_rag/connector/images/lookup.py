"""The scheduler's half of the fusion tier: whose state is loaded, and whose is computed and saved.

vLLM's scheduler calls it, all in one thread. For a request with an image whose features are needed:

* `see` before anything is asked about the request;
* `has` for each image. This decides, and a yes cannot be taken back. So the state is read and checked
  here and held until the workers have it. A file that vanishes later does no harm;
* `allocated` for each image whose features the workers will have, loaded or computed;
* `blended` in place of `allocated`, by the KV connector, for each image whose rows a blend computes;
* `step` once for every step, which gives the work of the workers;
* `finished` once.

Nothing here raises. If anything is wrong with a state, the image is computed and the reason is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from semkv_rag.connector.images.blended import BlendImage
from semkv_rag.connector.images.identifiers import StateRef, parse_identifier
from semkv_rag.connector.images.report import (
    ImageReport,
    note_image_report,
    take_image_report,
)
from semkv_rag.connector.touching import Touches
from semkv_rag.errors import SemKVError, StateFileError
from semkv_rag.store import KVStore, state_id

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

LARGEST_FEATURE = 32768.0
"""Features beyond are none of a sound model; in half precision they would overflow on their way."""

HELD_BYTES = 256 << 20
"""States that were read for requests that then got no place: more are read again."""

Outcome = Literal["loaded", "mapped", "computed"]


@dataclass
class ImageStep(ECConnectorMetadata):
    """The work of one step.

    Attributes:
        model: the fingerprint under which states are saved.
        loads: states to put into vLLM's encoder cache, [image tokens, width] each, by identifier.
        saves: by identifier, the images that this step computes and whose states are to be saved.
    """

    model: str
    loads: dict[str, Tensor] = field(default_factory=dict)
    saves: dict[str, StateRef] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """What the store has for an image.

    Attributes:
        state: [image tokens, width], or None when it must be computed.
        id: the state's, in the store.
        mapped: whether it is the donor's.
        reason: in words, why it must be computed.
    """

    state: Tensor | None = None
    id: str = ""
    mapped: bool = False
    reason: str | None = None


@dataclass
class _Images:
    """What became of a live request's images, by their place in it."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def report(self) -> ImageReport:
        outcomes = list(self.outcomes.values())
        return ImageReport(
            loaded=len(outcomes) - outcomes.count("computed"),
            computed=outcomes.count("computed"),
            mapped=outcomes.count("mapped"),
            reason="; ".join(dict.fromkeys(self.reasons.values())) or None,
        )


class StateLookup:
    """Finds stored features of images for the scheduler; one per engine.

    Args:
        store: None when it could not be opened, see `store_fault`.
        model: the model's fingerprint.
        widths: of one row of features, by modality, as vLLM measured them.
        store_fault: in words, why there is no store.
    """

    def __init__(
        self,
        store: KVStore | None,
        model: str,
        widths: Mapping[str, int],
        store_fault: str | None = None,
    ) -> None:
        self._store = store
        self._model = model
        self._widths = widths
        self._store_fault = store_fault
        self._touches = Touches(store.states.touch) if store is not None else None
        self._request: Request | None = None
        self._images: dict[str, _Images | None] = {}
        self._found: dict[tuple[str, int], _Found] = {}
        self._step = ImageStep(model)

    def close(self) -> None:
        """Called once, at shutdown."""
        if self._touches is not None:
            self._touches.close()
        if self._store is not None:
            self._store.close()

    def see(self, request: Request) -> None:
        """The scheduler is about to ask for this request's images; called again and again."""
        self._request = request
        if request.request_id not in self._images:
            named = any(parse_identifier(feature.identifier) for feature in request.mm_features)
            self._images[request.request_id] = _Images() if named else None
            if named:
                note_image_report(request.request_id, ImageReport())

    def has(self, identifier: str) -> bool:
        """Whether an image of the request that was seen last is loaded; if not, it is computed."""
        ref = parse_identifier(identifier)
        if ref is None or self._request is None:
            return False
        named = [f for f in self._request.mm_features if f.identifier == identifier]
        if len({_rows(feature) for feature in named}) != 1:
            return False  # a client gave images of several sizes one name; vLLM refuses that
        key = identifier, _rows(named[0])
        if key not in self._found:
            self._found[key] = self._find(ref, named[0])
        return self._found[key].state is not None

    def allocated(self, request: Request, index: int) -> None:
        """An image of a request was given its place in vLLM's encoder cache."""
        identifier = request.mm_features[index].identifier
        state, save = self._take(request, index)
        if state is not None:
            self._step.loads[identifier] = state
        if save is not None:
            self._step.saves[identifier] = save

    def blended(self, request: Request, index: int) -> BlendImage:
        """An image of a request of which a blend computes rows."""
        self.see(request)
        feature = request.mm_features[index]
        self.has(feature.identifier)
        state, save = self._take(request, index)
        return BlendImage(feature, state, save, self._model)

    def _take(self, request: Request, index: int) -> tuple[Tensor | None, StateRef | None]:
        """An image's features where they are stored, else what they are to be stored as; for the report,
        too."""
        feature = request.mm_features[index]
        ref = parse_identifier(feature.identifier)
        images = self._images.get(request.request_id)
        if ref is None or images is None:
            return None, None
        found = self._found.pop(
            (feature.identifier, _rows(feature)), _Found(reason="the store was not asked")
        )
        if found.state is not None:
            images.outcomes.setdefault(index, "mapped" if found.mapped else "loaded")
            if self._touches is not None:
                self._touches.note([found.id])
        else:
            images.outcomes[index] = "computed"
            images.reasons.setdefault(index, found.reason or "")
        note_image_report(request.request_id, images.report())
        saves = found.state is None and self._store is not None and not self._store.read_only
        return found.state, ref if saves and ref.save else None

    def step(self) -> ImageStep:
        """The work of the coming step; called once, after its requests were scheduled."""
        step, self._step = self._step, ImageStep(self._model)
        # What is left belongs to requests that got no place; they ask again.
        held, kept = 0, {}
        for key, found in self._found.items():
            if found.state is not None and held + found.state.nbytes <= HELD_BYTES:
                held += found.state.nbytes
                kept[key] = found
        self._found = kept
        return step

    def finished(self, request: Request) -> None:
        """The request is done, and its report was taken by whoever wanted it."""
        self._request = None
        if self._images.pop(request.request_id, None) is not None:
            take_image_report(request.request_id)

    def _find(self, ref: StateRef, feature: MultiModalFeatureSpec) -> _Found:
        if self._store is None:
            return _Found(reason=f"the store cannot be used: {self._store_fault}")
        reasons = []
        for key in (ref.donor_key, ref.key):
            if key is None:
                continue
            whose = "the image" if key == ref.key else "the image it is taken for"
            try:
                state = self._store.states.load(self._model, ref.namespace, key)
                if state is None:
                    reasons.append(f"the features of {whose} are not stored")
                    continue
                self._check(state, feature)
            except SemKVError as error:
                reasons.append(f"the stored features of {whose} cannot be used: {error}")
                continue
            except Exception as error:
                logger.exception("An image's features could not be read; the image is computed")
                reasons.append(f"the stored features of {whose} cannot be read: {error!r}")
                continue
            id_ = state_id(self._model, ref.namespace, key)
            return _Found(state, id_, mapped=key != ref.key)
        return _Found(reason="; ".join(reasons))

    def _check(self, state: Tensor, feature: MultiModalFeatureSpec) -> None:
        """That a state can stand for an image: vLLM would not start again from one that cannot.

        Raises:
            StateFileError: it has another shape, or values that no model makes of an image.
        """
        wanted = (_rows(feature), self._widths.get(feature.modality))
        if tuple(state.shape) != wanted:
            raise StateFileError(f"they are {list(state.shape)}, not {list(wanted)}")
        if not state.abs().amax() <= LARGEST_FEATURE:
            raise StateFileError(f"they hold values beyond {LARGEST_FEATURE}")


def _rows(feature: MultiModalFeatureSpec) -> int:
    """How many rows of features an image has."""
    return int(feature.mm_position.get_num_embeds())
