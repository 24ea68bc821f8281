"""What `semkv doctor --deep` has the workers check on the loaded model, while no request runs.

All of it writes over blocks of the paged cache: whoever asks empties vLLM's prefix cache behind it.
"""
