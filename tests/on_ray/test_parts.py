"""Parts of precompute on Ray that need no engine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from semkv_rag.corpus import Failure, PrecomputeProgress, PrecomputeResult
from semkv_rag.corpus.document_text import DocumentText
from semkv_rag.errors import EngineError, MissingExtraError, OptionError, StoreError
from semkv_rag.on_ray import EngineResources, precompute_on_ray
from semkv_rag.on_ray.cluster import cluster
from semkv_rag.on_ray.cores import bind_engine, claim_cores
from semkv_rag.on_ray.count import Count
from semkv_rag.on_ray.messages import PARCEL, PARCEL_CHARACTERS, Outcome, documents_of, parcels
from semkv_rag.on_ray.resources import Share, engine_arguments, share
from workbench.cli_page import commands
from workbench.settings import ROOT

CORES = len(os.sched_getaffinity(0))


def texts(*sizes: int) -> list[DocumentText]:
    return [DocumentText(f"{number}.txt", "x" * size, False) for number, size in enumerate(sizes)]


def sizes_of(rows: list[dict[str, str]]) -> list[list[int]]:
    return [[len(one.text) for one in documents_of(row[PARCEL])] for row in rows]


def test_parcels_hold_every_document_once() -> None:
    documents = texts(*range(0, 40_000, 977))
    rows = list(parcels(documents, 2))
    there = [one for row in rows for one in documents_of(row[PARCEL])]
    assert sorted(there, key=lambda one: one.name) == sorted(documents, key=lambda one: one.name)
    for sizes in sizes_of(rows):
        assert len(sizes) == 1 or sum(sizes) <= PARCEL_CHARACTERS


def test_large_documents_go_first_and_alone() -> None:
    rows = list(parcels(texts(10, 100_000, 10, 50_000), 1))
    assert sizes_of(rows) == [[100_000], [50_000], [10, 10]]


def test_a_small_corpus_is_spread_too() -> None:
    assert len(list(parcels(texts(*[100] * 16), 2))) == 8
    assert sizes_of(list(parcels(texts(0), 8))) == [[0]]


def test_outcomes_keep_what_they_say() -> None:
    result = PrecomputeResult(
        changed=2, tokens=7, failures=[Failure("a", "torn")], empty=("b",), computing_seconds=1.5
    )
    outcome = Outcome(("a", "b"), result)
    again = Outcome.from_row(outcome.to_row())
    assert (again.names, again.error) == (("a", "b"), None)
    assert again.result.failures == result.failures
    assert (again.result.changed, again.result.tokens) == (2, 7)
    failed = Outcome.from_row(Outcome(("a",), error=("StoreError", "disk full")).to_row())
    with pytest.raises(StoreError, match="disk full"):
        failed.check()
    with pytest.raises(EngineError, match="who knows"):
        Outcome((), error=("NoSuchError", "who knows")).check()


def test_what_is_told_is_added_up() -> None:
    told: list[PrecomputeProgress] = []
    result = PrecomputeResult(documents=3)
    count = Count(texts(10, 10, 20), result, told.append)
    one = PrecomputeResult(changed=1, unchanged=1, chunks_captured=4, computing_seconds=0.5)
    count.add(Outcome(("0.txt", "1.txt"), one))
    assert (told[-1].share, told[-1].documents, told[-1].documents_total) == (0.5, 2, 3)
    count.end()
    assert (result.changed, result.unchanged, result.chunks_captured) == (2, 0, 4)
    assert result.computing_seconds >= 0.5
    assert [one.source for one in result.failures] == ["2.txt"]
    assert "was killed" in result.failures[0].reason


@pytest.mark.parametrize(
    ("wanted", "there", "ranks", "expected"),
    [
        (EngineResources(), {"CPU": 2.0}, 1, Share(2, 1.0, 0.0)),
        (EngineResources(cpus=0.5), {"CPU": 2.0}, 1, Share(4, 0.5, 0.0)),
        (EngineResources(), {"CPU": 64.0, "GPU": 8.0}, 1, Share(8, 1.0, 1.0)),
        (EngineResources(), {"CPU": 64.0, "GPU": 8.0}, 4, Share(2, 1.0, 4.0)),
        (EngineResources(gpus=0.5), {"CPU": 64.0, "GPU": 1.0}, 1, Share(2, 1.0, 0.5)),
        (EngineResources(cpus=4, gpus=0), {"CPU": 8.0, "GPU": 1.0}, 1, Share(2, 4, 0.0)),
        (EngineResources(engines=16, gpus=1), {"CPU": 1.0}, 1, Share(16, 1.0, 1.0)),
    ],
)
def test_engines_take_what_is_there(
    wanted: EngineResources, there: dict[str, float], ranks: int, expected: Share
) -> None:
    assert share(wanted, there, ranks) == expected


def test_an_engine_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(OptionError, match="takes 4 CPUs and 0 GPUs, and the cluster has 2 and 0"):
        share(EngineResources(cpus=4), {"CPU": 2.0}, 1)


@pytest.mark.parametrize(
    "wrong", [{"engines": 0}, {"cpus": -1}, {"gpus": "1"}, {"cpus": 0, "gpus": 0}]
)
def test_impossible_resources_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        EngineResources(**wrong)


def test_engines_that_share_a_gpu_share_its_memory() -> None:
    assert engine_arguments({}, 0.5)["gpu_memory_utilization"] == 0.45
    assert engine_arguments({"gpu_memory_utilization": 0.3}, 0.5)["gpu_memory_utilization"] == 0.3
    assert "gpu_memory_utilization" not in engine_arguments({}, 1.0)
    assert "gpu_memory_utilization" not in engine_arguments({}, 0.0)


def test_a_core_is_one_process_s(tmp_path: Path) -> None:
    held: list[int] = []
    ours = claim_cores(1, folder=tmp_path, keep=held.append)
    assert len(ours) == 1
    assert claim_cores(CORES, folder=tmp_path, keep=held.append) == [], "one of them is taken"
    assert len(held) == 1
    others = claim_cores(CORES - 1, folder=tmp_path, keep=held.append)
    assert sorted(ours + others) == sorted(os.sched_getaffinity(0))
    for lock in held:
        os.close(lock)


@pytest.mark.slow
def test_a_killed_process_gives_its_core_back(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from semkv_rag.on_ray.cores import claim_cores;"
        "print(claim_cores(int(sys.argv[2]), folder=pathlib.Path(sys.argv[1])), flush=True);"
        "time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(CORES)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.readline().strip() == str(sorted(os.sched_getaffinity(0))).encode()
    assert claim_cores(1, folder=tmp_path, keep=os.close) == []
    holder.kill()
    holder.wait()
    assert len(claim_cores(1, folder=tmp_path, keep=os.close)) == 1


def test_a_binding_of_the_user_s_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    bind_engine(1)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    bind_engine(0.5)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.slow
def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    code = "import sys, semkv_rag.cli, semkv_rag.on_ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_extra_is_named_where_ray_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, reader: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"semkv-rag\[ray\]"):
        precompute_on_ray(str(reader), [tmp_path], store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_address_of_ray_s_client_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(OptionError, match="ray job submit"), cluster("ray://head:10001"):
        pass


def test_a_cluster_that_is_not_there_is_an_error_of_ours() -> None:
    pytest.importorskip("ray")
    with (
        pytest.raises(EngineError, match=r"Ray is not there: 127\.0\.0\.1:1"),
        cluster("127.0.0.1:1"),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--ray", "--max-bytes", "1GB"], "--max-bytes"), (["--ray-engines", "2"], "--ray")],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], named: str, reader: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from semkv_rag.cli import app

    answer = CliRunner().invoke(
        app,
        [
            *("precompute", str(tmp_path), "--model", str(reader)),
            *("--store", str(tmp_path / "kv"), *options),
        ],
    )
    assert answer.exit_code == 2
    assert named in answer.output


def test_the_job_for_kuberay_is_one_that_semkv_understands() -> None:
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    job = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster_spec = job["spec"]["rayClusterSpec"]
    groups = [cluster_spec["headGroupSpec"], *cluster_spec["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert pod["containers"][0]["env"][0]["name"] == "SEMKV_INDEX_URL"
    program, verb, *rest = shlex.split(job["spec"]["entrypoint"])
    assert (program, verb) == ("semkv", "precompute")
    rest[0] = str(ROOT)  # a path that exists
    given = commands()[verb].make_context("semkv precompute", rest).params
    assert (given["ray"], given["ray_engines"]) == (True, 8)
