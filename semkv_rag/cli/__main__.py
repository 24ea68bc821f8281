"""`python -m semkv_rag.cli`, for where the `semkv` script is not on the path."""

from semkv_rag.cli import main

main()
