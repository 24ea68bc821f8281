"""The store kept in order: what it holds, what is evicted or gone, and whether it is whole."""
