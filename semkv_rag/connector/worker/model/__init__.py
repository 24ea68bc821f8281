"""The loaded model and its paged KV cache, as blends and captures see them."""
