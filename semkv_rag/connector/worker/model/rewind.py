"""Requests that vLLM's second model runner counts further than the scheduler does.

Where KV turns out to be no number behind a request's first forward, the scheduler takes the request back
to the blend's beginning. The first model runner is told in each step how far each request is. The second
one keeps that count itself, on the device, and adds to it: it does not see a request go back.
"""

from __future__ import annotations

from typing import Any


def rewind(states: Any, cached: Any) -> None:
    """Set back what the runner counts of requests that the scheduler has taken back.

    Called before the step's forward, while the states are those behind the last one.

    Args:
        states: `RequestState` of vLLM's second model runner.
        cached: `CachedRequestData` of the coming step.
    """
    went_back = False
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        index = states.req_id_to_index.get(request_id)
        if index is None or computed >= states.num_computed_tokens_np[index]:
            continue
        states.num_computed_tokens.stage_write_elem(index, computed)
        # A token that was sampled of it is none: nobody has seen it.
        states.total_len.stage_write_elem(index, int(states.prefill_len.np[index]))
        went_back = True
    if went_back:
        states.num_computed_tokens.apply_write()
        states.total_len.apply_write()
