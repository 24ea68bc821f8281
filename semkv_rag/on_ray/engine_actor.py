"""An engine in a process of Ray's: it stores the parcels of documents that Ray Data hands it."""

from __future__ import annotations

import gc
import os
import traceback
from functools import partial
from typing import Any

from semkv_rag.corpus.capture import CAPTURING_ARGS
from semkv_rag.corpus.document_text import DocumentText
from semkv_rag.corpus.progress import PrecomputeResult
from semkv_rag.corpus.run import PrecomputeRun
from semkv_rag.errors import EngineError, OptionError, SemKVError, StoreError
from semkv_rag.on_ray.cores import bind_engine
from semkv_rag.on_ray.messages import PARCEL, Job, Outcome, documents_of
from semkv_rag.store import StorePlace
from semkv_rag.store.identity import store_identity

STARTS = 3
"""So often an engine is started that does not come up: something may have killed it."""


class EngineActor:
    """A class for Ray Data's `map_batches`, of batches of one row; several threads may call it.

    What cannot be helped, such as a model that vLLM does not load, is the outcome of its parcels. When
    vLLM stops, this process ends: Ray starts another, and hands it what was not done.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._place = StorePlace.from_mapping(job.place)
        self._engine: Any = None
        self._capturer: Any = None  # the engine, or the engine with the job's adapter
        self._error: tuple[str, str] | None = None
        try:
            self._check_store()
            self._start()
        except SemKVError as error:
            self._error = _in_words(error)
        # As vLLM's server does: collecting what its imports left takes half a second or more, in which no
        # thread goes on, also not one that holds the index's lock.
        gc.collect()
        gc.freeze()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        outcomes = [self._outcome(documents_of(str(parcel))).to_row() for parcel in batch[PARCEL]]
        return {name: [row[name] for row in outcomes] for name in outcomes[0]}

    def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()

    def _outcome(self, documents: list[DocumentText]) -> Outcome:
        names = tuple(one.name for one in documents)
        if self._error is not None:
            return Outcome(names, error=self._error)
        try:
            return Outcome(names, self._store(documents))
        except EngineError:
            traceback.print_exc()  # for whoever reads the actor's log
            os._exit(1)
        except SemKVError as error:
            return Outcome(names, error=_in_words(error))
        except Exception as error:  # Ray would log it and leave the documents out
            traceback.print_exc()
            return Outcome(names, error=("EngineError", f"a fault of semkv-rag: {error!r}"))

    def _store(self, documents: list[DocumentText]) -> PrecomputeResult:
        job = self._job
        run = PrecomputeRun(self._capturer, job.namespace, job.prefix, job.context, None)
        run.read(
            [
                (one.name, partial(one.document, run.settings, job.chunk_tokens, job.overlap))
                for one in documents
            ]
        )
        run.compute()
        return run.result

    def _check_store(self) -> None:
        """Make sure that the store is the driver's.

        Raises:
            StoreError: it is another one, or its index cannot be used from here.
        """
        import ray

        job, node = self._job, ray.get_runtime_context().get_node_id()
        root = self._place.root
        if job.store_id is not None and not (
            root.is_dir() and store_identity(root) == job.store_id
        ):
            raise StoreError(
                f"{root} on Ray's node {node} is not the store that stands there where precompute was"
                " started: mount the same folder"
            )
        if node != job.driver_node and (job.index_url or "sqlite").startswith("sqlite"):
            raise StoreError(
                "the store's index is SQLite, which one machine can write, and an engine was started on"
                f" another (Ray's node {node}): give the store an index in PostgreSQL (--index-url)"
            )

    def _start(self) -> None:
        from semkv_rag.engine import Engine, LoRARequest

        job = self._job
        bind_engine(job.cpus)
        for left in reversed(range(STARTS)):
            try:
                self._engine = Engine(
                    job.model,
                    store=self._place,
                    index_url=job.index_url,
                    codec=job.codec,
                    **{**CAPTURING_ARGS, **job.engine_args},
                )
                break
            except EngineError:
                if not left:
                    raise
                traceback.print_exc()  # for whoever reads the actor's log
        if not self._engine.gate.servable:
            raise EngineError(f"this model cannot be served with reuse: {self._engine.gate.reason}")
        self._capturer = self._engine
        if job.lora is not None:
            self._capturer = self._engine.with_adapter(LoRARequest(job.lora[0], 1, job.lora[1]))
        if self._capturer.fingerprint != job.fingerprint:
            raise OptionError(
                f"the engine runs as model {self._capturer.fingerprint[:16]}, not as"
                f" {job.fingerprint[:16]} as was worked out before: the machines differ; give dtype and"
                " what else is chosen by the machine as engine arguments"
            )


def fingerprint_there(
    model: str, engine_args: dict[str, Any], adapter: str | None
) -> tuple[str, tuple[str, str] | None]:
    """The fingerprint of a model where engines will run, or the error, as `Outcome` has it.

    Args:
        adapter: the folder of a LoRA adapter, for the model with it.
    """
    from semkv_rag.engine.launch import adapter_fingerprint, model_fingerprint

    try:
        if adapter is not None:
            return adapter_fingerprint(model, adapter, **engine_args), None
        return model_fingerprint(model, **engine_args), None
    except SemKVError as error:
        return "", _in_words(error)


def _in_words(error: SemKVError) -> tuple[str, str]:
    return type(error).__name__, str(error)
