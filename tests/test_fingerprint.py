"""The fingerprint changes with everything that changes an answer, and with nothing else."""

import json
import os
import shutil
import time
from itertools import permutations
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mathinterp.models import fingerprint
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.fingerprint import file_digest, file_digests, model_fingerprint
from mathinterp.models.random_shapes import random_fingerprint
from mathinterp.models.sources import find_source
from tests.tiny import save_tiny, tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mathinterp" / "digests"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", "llama")


def fingerprint_of(folder: Path, adapter: Path | None = None) -> str:
    return resolve(ModelSpec(str(folder), adapter=None if adapter is None else str(adapter))).fingerprint


def flip_byte(file: Path, offset: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def save_adapter(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("llama", dtype=torch.float32), config).save_pretrained(folder)
    return folder


def test_it_is_sixteen_hex_digits_and_stays(folder: Path) -> None:
    first = fingerprint_of(folder)
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert fingerprint_of(folder) == first


def test_it_does_not_depend_on_where_or_by_whom_it_was_saved(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))
    config = json.loads((moved / "config.json").read_text())
    config.update(_name_or_path="someone/else", transformers_version="9.9", dtype="bfloat16", use_cache=False)
    (moved / "config.json").write_text(json.dumps(config, indent=7))
    (moved / "README.md").write_text("a model")
    assert fingerprint_of(moved) == fingerprint_of(folder)


def test_one_weight_byte_changes_it(folder: Path) -> None:
    before = fingerprint_of(folder)
    flip_byte(folder / "model.safetensors")
    assert fingerprint_of(folder) != before


def test_the_config_changes_it(folder: Path) -> None:
    before = fingerprint_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert fingerprint_of(folder) != before


def test_the_tokenizer_changes_it(folder: Path) -> None:
    before = fingerprint_of(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"plus"', '"PLUS"'))
    changed = fingerprint_of(folder)
    assert changed != before
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_prefix_space": True}))
    assert fingerprint_of(folder) not in (before, changed)


@pytest.mark.slow
def test_the_adapter_changes_it(folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    other = save_adapter(tmp_path / "other", seed=1)
    found = [fingerprint_of(folder), fingerprint_of(folder, adapter), fingerprint_of(folder, other)]
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}))
    found.append(fingerprint_of(folder, adapter))
    assert len(set(found)) == 4
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "another/name"}))
    assert fingerprint_of(folder, adapter) == found[1]


@pytest.mark.slow
def test_what_an_adapter_does_to_its_base_changes_it(folder: Path, tmp_path: Path) -> None:
    """PiSSA and OLoRA take other parts out of the base when the same A and B are loaded."""
    adapter = save_adapter(tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    found = {}
    for mode in (True, False, "pissa", "olora"):
        file.write_text(json.dumps({**config, "init_lora_weights": mode}))
        found[mode] = fingerprint_of(folder, adapter)
    assert found[True] == found[False], "what is drawn at the beginning is overwritten"
    assert len(set(found.values())) == 3
    file.write_text(json.dumps({**config, "use_rslora": True}))
    assert fingerprint_of(folder, adapter) not in found.values()


@pytest.mark.slow
def test_the_order_in_which_peft_wrote_a_set_of_modules_is_no_other_adapter(folder: Path, tmp_path: Path) -> None:
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], exclude_modules=["lm_head", "up_proj"])
    get_peft_model(tiny_model("llama", dtype=torch.float32), options).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    fields, found = json.loads(file.read_text()), set()
    for modules in permutations(["q_proj", "v_proj", "o_proj"]):
        for excluded in (["lm_head", "up_proj"], ["up_proj", "lm_head"]):
            file.write_text(json.dumps({**fields, "target_modules": modules, "exclude_modules": excluded}))
            found.add(fingerprint_of(folder, tmp_path / "adapter"))
    assert len(found) == 1
    file.write_text(json.dumps({**fields, "exclude_modules": ["lm_head"]}))
    assert fingerprint_of(folder, tmp_path / "adapter") not in found


def test_shards_may_be_renamed_but_not_cut_anew(folder: Path) -> None:
    whole = fingerprint_of(folder)
    tiny_model("llama", dtype=torch.float32).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()
    sharded = fingerprint_of(folder)
    assert sharded != whole
    index = folder / "model.safetensors.index.json"
    first = sorted(folder.glob("model-*.safetensors"))[0]
    index.write_text(index.read_text().replace(first.name, "zzz.safetensors"))
    first.rename(folder / "zzz.safetensors")
    assert fingerprint_of(folder) == sharded


def big_file(file: Path) -> Path:
    """Two MiB of noise: large enough to be remembered."""
    file.write_bytes(os.urandom(2 * 2**20))
    return file


def test_digests_are_kept_and_damage_to_them_is_harmless(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = big_file(tmp_path / "weights")
    expected = file_digest(file)
    assert not own_cache.exists(), "a file changed a moment ago must not be remembered"
    now = time.time()
    monkeypatch.setattr(fingerprint.time, "time", lambda: now + 60)
    assert file_digest(file) == expected
    (entry,) = own_cache.iterdir()
    read = []
    hash_piece = fingerprint._hash_piece
    monkeypatch.setattr(fingerprint, "_hash_piece", lambda *piece: read.append(piece) or hash_piece(*piece))
    assert file_digest(file) == expected
    assert read == []
    good = entry.read_text()
    for damaged in ("", "x", good[:-1] + ("0" if good[-1] != "0" else "1"), "0" * 64 + good[64:]):
        entry.write_text(damaged)
        read.clear()
        assert file_digest(file) == expected
        assert len(read) == 1
    assert entry.read_text() == good


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = big_file(tmp_path / "weights")
    now = time.time()
    monkeypatch.setattr(fingerprint.time, "time", lambda: now + 60)
    before, stamp = file_digest(file), file.stat()
    flip_byte(file)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file_digest(file) != before, "same path, size and modification time, but the change time gives it away"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    now = time.time()
    monkeypatch.setattr(fingerprint.time, "time", lambda: now + 60)
    file = big_file(tmp_path / "weights")
    assert file_digest(file) == file_digest(file)


def test_pieces_of_a_file_are_hashed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_PIECE", 10)
    a, b, empty = tmp_path / "a", tmp_path / "b", tmp_path / "empty"
    a.write_bytes(b"0123456789abcdefghij")
    b.write_bytes(b"abcdefghij0123456789")
    empty.write_bytes(b"")
    together = file_digests([a, b, empty])
    assert together == [file_digest(a), file_digest(b), file_digest(empty)]
    assert len(set(together)) == 3


def test_random_shapes_have_fingerprints_too() -> None:
    found = [
        random_fingerprint("llama-tiny", 0),
        random_fingerprint("llama-tiny", 1),
        random_fingerprint("gpt-j-6b", 0),
    ]
    assert len({*found}) == 3
    assert resolve(ModelSpec("random:llama-tiny:1")).fingerprint == found[1]


def test_all_code_that_comes_with_a_model_counts_where_it_is_run(folder: Path) -> None:
    source = find_source(str(folder))
    without = model_fingerprint(source)
    seen = {without}
    assert model_fingerprint(source, with_code=True) == without  # there is none yet
    for name in ("modeling.py", "parts/attention.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        for content in ("x = 1", "x = 2"):
            (folder / name).write_text(content)
            seen.add(model_fingerprint(source, with_code=True))
            assert model_fingerprint(source) == without
    assert len(seen) == 5
