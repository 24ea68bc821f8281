"""Alembic migrations of the index. `semkv_rag.store.index.database` runs them when a store is opened."""
