"""What the fusion tier says of a request's images; kept in the process of vLLM's scheduler."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

KEPT_REPORTS = 10_000


@dataclass(frozen=True)
class ImageReport:
    """What became of the images of one request.

    An image whose features nobody needed is not counted: vLLM had its KV, or its features from an
    earlier request.

    Attributes:
        loaded: images whose features came from the store.
        computed: images that went through the vision tower.
        mapped: how many of the loaded ones have the state of another image, their donor.
        reason: in words, why images were computed; None when none was.
    """

    loaded: int = 0
    computed: int = 0
    mapped: int = 0
    reason: str | None = None


_reports: OrderedDict[str, ImageReport] = OrderedDict()


def take_image_report(request_id: str) -> ImageReport | None:
    """What became of a request's images; once, in the process of vLLM's scheduler.

    Returns:
        None when the tier does not run, or the request had no images that may be reused.
    """
    return _reports.pop(request_id, None)


def note_image_report(request_id: str, report: ImageReport) -> None:
    """Keep a request's report until it is taken; the oldest go where nobody takes them."""
    _reports[request_id] = report
    while len(_reports) > KEPT_REPORTS:
        _reports.popitem(last=False)
