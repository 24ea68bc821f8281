"""What the package uses of vLLM, checked against a vLLM's source: `python -m workbench.vllm_names`."""
