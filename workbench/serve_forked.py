"""`semkv serve` with its engine's processes taken from a fork server, for `workbench/server.py`.

They start sooner, and do not poll for a second after each message: see `workbench/forkserver.py`.
"""

from semkv_rag.cli import main
from workbench import forkserver

# The engine's processes import this file, too.
if __name__ == "__main__":
    forkserver.install()
    main()
