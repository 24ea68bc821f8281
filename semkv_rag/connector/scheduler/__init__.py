"""The connector's side in vLLM's scheduler: which stored KV a request reuses, and where it goes."""
