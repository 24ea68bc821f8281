"""What `semkv doctor --deep` has the workers check on the loaded model, while no request runs.

All checks write over blocks of the paged cache. So the caller empties vLLM's prefix cache afterwards.
"""
