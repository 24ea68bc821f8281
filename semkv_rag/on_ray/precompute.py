"""The driver of a precompute run on Ray: it compares, hands out what is missing, and counts.

Documents are read and compared with the store here. Those that are new or changed go to the engines, as
rows of a Ray dataset: an engine that is done takes the next, and what a killed one had goes to another.
Each engine runs `PrecomputeRun` on its rows, so that ids, contexts and tokens are those of one engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.corpus import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_CONTEXT,
    ContextMode,
    DocumentFile,
    LazyCapturer,
    OnProgress,
    PrecomputeResult,
    find_files,
)
from semkv_rag.corpus.capture import Capturer
from semkv_rag.corpus.document_text import DocumentText, read_text
from semkv_rag.corpus.run import Document, PrecomputeRun
from semkv_rag.corpus.split import check_sizes
from semkv_rag.errors import EngineError
from semkv_rag.known_fingerprints import KnownFingerprint
from semkv_rag.model_name import check_model
from semkv_rag.on_ray.cluster import (
    check_installed,
    cluster,
    is_here,
)
from semkv_rag.on_ray.count import RETRIES, Count
from semkv_rag.on_ray.engine_actor import EngineActor, fingerprint_there
from semkv_rag.on_ray.messages import Job, Outcome, parcels
from semkv_rag.on_ray.resources import EngineResources, Share, engine_arguments, share
from semkv_rag.store import KVStore, StorePlace
from semkv_rag.store.codecs import PLAIN, codec_named
from semkv_rag.store.identity import store_identity

PARCELS_AT_ONCE = 2
"""Parcels that an engine has. While one is split or written, another keeps the engine busy."""


def precompute_on_ray(
    model: str,
    paths: Iterable[str | Path],
    *,
    store: str | Path | StorePlace,
    index_url: str | None = None,
    codec: str = PLAIN,
    address: str | None = None,
    resources: EngineResources | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    overlap: int = 0,
    prefix: str = "",
    context: Sequence[ContextMode] = DEFAULT_CONTEXT,
    sync: bool = False,
    lora: tuple[str, str] | None = None,
    on_progress: OnProgress | None = None,
    **engine_args: Any,
) -> PrecomputeResult:
    """Store the KV of the documents under `paths` with several engines on a Ray cluster.

    What is stored is what `precompute` stores with one engine, and both go on where the other was
    stopped. The store's folder must be the same on all machines, or the store be in an object store;
    and its index in PostgreSQL where there are several.

    Args:
        model: a folder or a hub name, which the engines find on their machines.
        store: the store's folder or URL; `index_url` its index, when that is elsewhere.
        codec: by which chunks are stored.
        address: of the cluster, or `auto` or `local`. None: `RAY_ADDRESS`, else a cluster that is started
            on this machine and ends with the run. Where Ray is connected already, that is used.
        resources: how many engines there are, and what each takes.
        lora: name and folder of a LoRA adapter, whose chunks are stored; the folder is on all
            machines, and `enable_lora` among the engine arguments.
        engine_args: fields of vLLM's `AsyncEngineArgs`, as for `Engine`.

    All else is as for `precompute`.

    Returns:
        As `precompute` does. Chunks that an engine computed before it was killed count as found.

    Raises:
        MissingExtraError: Ray is not installed.
        CorpusError, OptionError, StoreError: as of `precompute`; also when the engines do not see the
            store.
        EngineError: Ray or vLLM could not be started. What was computed before is kept.
    """
    started = time.monotonic()
    check_sizes(chunk_tokens, overlap)
    check_installed()
    codec_named(codec)
    check_model(model, engine_args.get("download_dir"))
    wanted = resources or EngineResources()
    found = find_files(map(Path, paths))
    known = KnownFingerprint(model, engine_args) if is_here(address) and lora is None else None
    with ExitStack() as stack:
        kv_store = stack.enter_context(KVStore(store, index_url=index_url))

        @cache
        def ray() -> Any:
            return stack.enter_context(cluster(address))

        def fingerprint() -> str:
            if known is not None and (remembered := known.get()) is not None:
                return remembered
            return _fingerprint(
                ray(), model, engine_args, wanted, None if lora is None else lora[1]
            )

        capturer = LazyCapturer(kv_store, fingerprint=fingerprint, start=_no_engine)
        run = PrecomputeRun(capturer, namespace, prefix, context, on_progress)
        texts: dict[str, DocumentText] = {}

        def read(file: DocumentFile) -> Document:
            texts[file.name] = text = read_text(file)
            return text.document(run.settings, chunk_tokens, overlap)

        run.read([(file.name, partial(read, file)) for file in found.documents])
        if known is not None:
            known.remember(capturer.fingerprint)
        if todo := [texts[name] for name in run.pending]:
            each = share(wanted, ray().cluster_resources(), _ranks(engine_args))
            job = Job(
                model=model,
                place=kv_store.place.to_mapping(),
                store_id=None if kv_store.place.objects else store_identity(kv_store.root),
                index_url=index_url,
                codec=codec,
                lora=lora,
                fingerprint=capturer.fingerprint,
                namespace=namespace,
                prefix=prefix,
                context=tuple(context),
                chunk_tokens=chunk_tokens,
                overlap=overlap,
                driver_node=ray().get_runtime_context().get_node_id(),
                cpus=each.cpus,
                engine_args=engine_arguments(engine_args, each.gpus),
            )
            count = Count(todo, run.result, on_progress)
            for outcome in _outcomes(ray(), job, each, todo):
                count.add(outcome)
            count.end()
        if sync:
            run.remove_gone(found.folders, {file.name for file in found.documents})
    run.result.skipped = found.skipped
    run.result.seconds = time.monotonic() - started
    return run.result


def _outcomes(
    ray: Any, job: Job, each: Share, documents: Sequence[DocumentText]
) -> Iterator[Outcome]:
    """What engines on the cluster make of the documents, as they are done.

    Raises:
        EngineError: Ray stopped, or cannot start the engines.
    """
    from ray.data import ActorPoolStrategy, DataContext, from_items

    rows = list(parcels(documents, each.engines))
    engines = min(each.engines, len(rows))
    settings = DataContext.get_current().copy()
    settings.max_errored_blocks = -1  # a document that kills its engines ends no run
    settings.max_consecutive_actor_init_deaths = RETRIES
    settings.enable_rich_progress_bars, settings.use_ray_tqdm = True, False
    with DataContext.current(settings), catch_warnings():
        # Ray wants named arguments in place of `max_task_retries`, and has none for it yet.
        simplefilter("ignore", DeprecationWarning)
        dataset = from_items(rows, override_num_blocks=len(rows)).map_batches(
            EngineActor,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ActorPoolStrategy(
                size=engines,
                max_concurrent_calls_per_actor=PARCELS_AT_ONCE,
                max_tasks_in_flight_per_actor=PARCELS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            num_cpus=each.cpus,
            num_gpus=each.gpus,
            max_task_retries=RETRIES,
        )
    try:
        for row in dataset.iter_rows():
            yield Outcome.from_row(row)
    except ray.exceptions.RayError as error:
        raise EngineError(f"Ray stopped the run: {error}") from error


def _fingerprint(
    ray: Any,
    model: str,
    engine_args: Mapping[str, Any],
    wanted: EngineResources,
    adapter: str | None,
) -> str:
    """The fingerprint of the model, with the adapter in this folder, where engines will run.

    Raises:
        SemKVError: as of `model_fingerprint`.
        EngineError: Ray cannot have it worked out.
    """
    each = share(wanted, ray.cluster_resources(), _ranks(engine_args))
    task = ray.remote(num_cpus=each.cpus, num_gpus=each.gpus)(fingerprint_there)
    arguments = engine_arguments(engine_args, each.gpus)
    try:
        fingerprint, error = ray.get(task.remote(model, arguments, adapter))
    except ray.exceptions.RayError as failed:
        raise EngineError(f"Ray did not work out the model's fingerprint: {failed}") from failed
    Outcome((), error=error).check()
    return str(fingerprint)


def _ranks(engine_args: Mapping[str, Any]) -> int:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return math.prod(int(engine_args.get(name) or 1) for name in sizes)


def _no_engine() -> Capturer:
    raise AssertionError("the driver computes nothing")
