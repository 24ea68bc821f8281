"""Takes requests back in vLLM's second model runner when the scheduler takes them back.

The scheduler takes a request back to the blend's beginning where its first forward shows that its KV is
no number. vLLM tells its first model runner in each step how many tokens of each request are computed.
The second model runner keeps that count itself, on the device, and only adds to it. So it has to be set
back.
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
