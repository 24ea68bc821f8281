"""Names that move from one vLLM version to the next. The package imports them from here.

`python -m workbench.vllm_names` checks them, and all other names of vLLM that the package uses, against a
vLLM that need not be installed.
"""

from __future__ import annotations

try:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (
        BaseFrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.entrypoints.common.startup import cli_env_setup
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import (
        BaseFrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

__all__ = ["BaseFrontendArgs", "cli_env_setup", "make_arg_parser", "validate_parsed_serve_args"]
