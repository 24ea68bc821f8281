"""Blends: stored KV is loaded into a request's blocks, and the rest is computed."""
