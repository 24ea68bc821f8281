"""Captures: the KV of prefilled chunks is copied out of the paged cache and written to the store."""
