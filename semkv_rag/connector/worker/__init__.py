"""The connector's side in vLLM's workers: blends and captures, beside the model.

`executor` is called by the connector, once before and once behind each step's forward. `model/` is the
model and its paged cache as a blend sees them, `blend/` fills blocks, `capture/` reads them.
"""
