"""Tests of `semkv_rag.store`."""
