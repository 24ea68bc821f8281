"""`semkv verify` finds what is broken, says so by its exit code, and mends it when told to."""

from pathlib import Path

import pytest

from tests.cli.conftest import Semkv


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_sound_store(semkv: Semkv, root: Path) -> None:
    outcome = semkv("verify", "--store", root)
    assert outcome.code == 0
    assert "5 chunks" in outcome.out
    assert "0 problems" in outcome.out
    assert semkv("verify", "--store", root, "--json").data["ok"] is True


@pytest.mark.parametrize("harm", [Path.unlink, flip_a_bit])
def test_a_broken_promise_is_found_and_mended(semkv: Semkv, root: Path, harm) -> None:
    broken = sorted(root.rglob("*.safetensors"))[0]
    harm(broken)
    outcome = semkv("verify", "--store", root)
    assert outcome.code == 1
    assert broken.name in outcome.out
    assert "--repair" in outcome.err

    found = semkv("verify", "--store", root, "--json")
    assert found.code == 1
    assert found.data["ok"] is False
    assert len(found.data["problems"]) == 1

    mended = semkv("verify", "--repair", "--store", root)
    assert mended.code == 0
    assert "repaired" in mended.out
    assert semkv("verify", "--store", root).code == 0


def test_a_lost_index_is_made_again_from_the_files(semkv: Semkv, root: Path) -> None:
    for file in root.glob("index.sqlite*"):
        file.unlink()
    found = semkv("verify", "--store", root)
    assert found.code == 1
    assert "semkv verify --repair" in found.err
    assert semkv("verify", "--repair", "--store", root).code == 0
    info = semkv("info", "--store", root, "--json").data
    assert sum(one["chunks"] for one in info["namespaces"]) == 5


def test_what_nothing_promises_is_named_with_what_mends_it(semkv: Semkv, root: Path) -> None:
    sound = sorted(root.rglob("*.safetensors"))[0]
    sound.with_name("0" * 64 + ".safetensors").write_bytes(sound.read_bytes()[:-1])
    outcome = semkv("verify", "--store", root)
    assert outcome.code == 0
    assert "debris" in outcome.out and "--repair" in outcome.err
    assert "--repair" not in semkv("verify", "--repair", "--store", root).err
    assert "debris" not in semkv("verify", "--store", root).out
