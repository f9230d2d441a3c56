"""A command that asks a warm service imports neither torch nor transformers, and stores what a local run stores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mathinterp as mi
from mathinterp.experiments.heads import Heads
from mathinterp.models import catalog, recalled
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.fast_tokenizer import QuickTokenizer
from mathinterp.models.recalled import RecalledModel, look_up
from mathinterp.models.tokenizer_files import PROBES, with_backend
from mathinterp.store import Store
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level
from tests.service_case import served
from tests.tiny import save_tiny
from tests.tiny_gguf import save_tiny_gguf

HEAVY = ("torch", "transformers", "transformers.modeling_utils", "ray", "aiohttp", "mathinterp.models.catalog")
COMMAND = f"""
import sys
from mathinterp.cli.main import main
main(sys.argv[1:], standalone_mode=False)
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
PROMPTS = [{"text": f"{a} plus 5 is", "answer": str(a + 5), "operation": "add"} for a in (3, 14, 62)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that a test may change, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "model", "llama")


def rows(store: Path) -> Any:
    return Store(store).arrow("SELECT * FROM head_scan ORDER BY ALL")


@pytest.mark.slow
def test_a_follow_up_question_by_the_command_line_imports_no_torch(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))

    def asked(url: str, layer: int) -> tuple[dict[str, Any], str]:
        words = ["scan", "heads", "--model", str(folder), "--prompts", str(prompts), "--layers", str(layer)]
        words += ["--store", str(tmp_path / f"there{layer}"), "--service", url, "--json", "-q"]
        given = [sys.executable, "-c", COMMAND, *words]
        done = subprocess.run(given, capture_output=True, text=True, check=True, env=dict(os.environ))
        return json.loads(done.stdout), done.stderr.splitlines()[-1]

    with served() as (url, _, _):
        asked(url, 0)  # the first question about a model looks at it
        found, imported = asked(url, 1)
    here = mi.run(Heads(layers="1"), str(folder), mi.prompts(str(prompts)), store=str(tmp_path / "h"), progress=False)
    assert imported == "[]"
    assert found["run_id"] == here.id
    assert rows(tmp_path / "there1").equals(rows(tmp_path / "h"))
    records = [json.loads((tmp_path / at / "runs" / f"{here.id}.json").read_text()) for at in ("there1", "h")]
    assert records[0]["versions"] == records[1]["versions"]


def alike(one: Any, other: Any) -> None:
    """Every fact about a model but its config, whose objects are never equal."""
    for name in ("spec", "source", "adapter", "shape", "fingerprint", "dtype", "label"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.config.to_dict() == other.config.to_dict()


def test_a_model_is_recalled_as_it_was_found_and_looked_at_anew_when_a_file_changes(folder: Path) -> None:
    spec = ModelSpec(str(folder), dtype="float64")
    found = look_up(spec, "cpu")
    assert not isinstance(found, RecalledModel)
    recalled_one = look_up(spec, "cpu")
    assert isinstance(recalled_one, RecalledModel)
    alike(recalled_one, found)
    save_tiny(folder, "llama", seed=1)
    again = look_up(spec, "cpu")
    assert not isinstance(again, RecalledModel)
    assert again.fingerprint == resolve(spec).fingerprint != found.fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_cache": not config.get("use_cache", True)}))
    assert not isinstance(look_up(spec, "cpu"), RecalledModel)


@pytest.mark.parametrize(
    "spec", [ModelSpec("random:llama-tiny"), ModelSpec("bundled", trust_remote_code=True)], ids=lambda spec: spec.name
)
def test_models_that_only_loading_can_tell_are_looked_at_each_time(
    spec: ModelSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[ModelSpec] = []
    real = catalog.resolve
    monkeypatch.setattr(catalog, "resolve", lambda *given: looked.append(given[0]) or real(*given))
    for _ in range(2):
        look_up(spec, "cpu")
    assert looked == [spec] * 2


TEXTS = (*PROBES, "<s>3 plus 5 is 8</s>", "")
KINDS = {
    "words": lambda: word_level(TEXTS, adds_eos=True), "llama": lambda: llama_like(TEXTS),
    "gpt2": lambda: gpt2_like(TEXTS),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "gguf", pytest.param("bundled", marks=pytest.mark.bundled)])
def test_a_recalled_tokenizer_cuts_texts_and_names_tokens_as_transformers_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in KINDS:
        made = KINDS[kind]()
        whole = with_backend(made, made.backend_tokenizer)
        quick: Any = QuickTokenizer(**(recalled._tokenizer_facts(whole) or {}))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        spec = ModelSpec(kind if kind == "bundled" else str(save_tiny_gguf(tmp_path / "tiny.gguf")))
        whole, quick = look_up(spec, "cpu").tokenizer, look_up(spec, "cpu").tokenizer  # type: ignore[assignment]
    assert isinstance(quick, QuickTokenizer)
    for added in (True, False):
        options: Any = {"add_special_tokens": added, "return_offsets_mapping": True}
        expected, found = whole(list(TEXTS), **options), quick(list(TEXTS), **options)
        assert found["input_ids"] == expected["input_ids"]
        assert found["offset_mapping"] == expected["offset_mapping"]
    ids = whole(TEXTS[-2])["input_ids"]
    assert quick(TEXTS[-2]) == {"input_ids": ids}
    assert quick.convert_ids_to_tokens(ids) == whole.convert_ids_to_tokens(ids)
    assert quick.convert_ids_to_tokens(ids[0]) == whole.convert_ids_to_tokens(ids[0])
    for token in whole.SPECIAL_TOKENS_ATTRIBUTES:
        assert getattr(quick, token) == getattr(whole, token)
        assert getattr(quick, f"{token}_id") == getattr(whole, f"{token}_id")
    assert (len(quick), quick.decode(ids), quick.get_vocab()) == (len(whole), whole.decode(ids), whole.get_vocab())
    assert quick.all_special_ids == whole.all_special_ids


def test_a_tokenizer_that_is_more_than_its_parts_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalled, "_tokenizer_facts", lambda tokenizer: None)
    spec = ModelSpec(str(folder))
    assert not any(isinstance(look_up(spec, "cpu"), RecalledModel) for _ in range(2))
