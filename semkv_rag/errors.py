"""Every error this package raises.

SemKVError
├── OptionError          an option or a request asks for something that is not there; says what is
├── StoreError           the store cannot do what was asked
│   ├── ChunkFileError   a chunk file is missing, torn, altered or foreign
│   ├── StateFileError   the same of an image's state file
│   ├── StoreLimitError  a limit of the store leaves no room for what is to be added
│   ├── ObjectStoreError   the object store does not answer, or fails
│   └── StoreVersionError  the store was written by a newer version
├── CorpusError          a document cannot be read
├── EngineError          vLLM could not be started, or stopped
└── MissingExtraError    a package of an optional extra is not installed; names the extra

Errors are for callers who can do something about them. A fault of the store met while a request is
served is not one of them: the request is prefilled as by plain vLLM and the fault is the `reason` in
its reuse report.
"""


class SemKVError(Exception):
    """Base of every error of this package."""


class OptionError(SemKVError, ValueError):
    """An option has a value that cannot be used; the message names what can."""


class StoreError(SemKVError):
    """The store cannot do what was asked of it."""


class ChunkFileError(StoreError):
    """A chunk file is missing, torn, altered, or belongs to another model."""


class StateFileError(StoreError):
    """A state file is missing, torn, altered, or belongs to another model."""


class StoreLimitError(StoreError):
    """A limit of the store leaves no room for what is to be added; the message names the ways out."""


class ObjectStoreError(StoreError):
    """The object store that a store's files are in does not answer in time, or fails."""


class StoreVersionError(StoreError):
    """The store's schema or a file's format is newer than this version of the package."""


class CorpusError(SemKVError):
    """A document cannot be read or split."""


class EngineError(SemKVError):
    """vLLM could not be started, or it stopped."""


class MissingExtraError(SemKVError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, *extras: str) -> None:
        """`extras` are the ones that bring the package; any of them will do."""
        how = " or ".join(f"'semkv-rag[{extra}]'" for extra in extras)
        super().__init__(f"{package} is not installed: pip install {how}", name=package)
