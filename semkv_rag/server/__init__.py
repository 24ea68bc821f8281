"""`semkv serve`: vLLM's OpenAI server with our connector, our routes, and tenants kept apart.

`serve` starts it; `front` lets requests in (`tenants` says who may what, `limits` how much); `routes` are
the routes that vLLM does not have.
"""

import semkv_rag.engine  # noqa: F401  without vLLM it says what to install
