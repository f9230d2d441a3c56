"""A model that was looked at before, found again without torch and without transformers' models.

What ``catalog.resolve`` makes of a model's files beside its config, sizes and a tokenizer, is kept in the user's cache
under a hash of all that decides it: the contents of these files, this package's source and the versions of the
libraries. A model that only loading can tell (random weights, code of its own, one of the hub) is looked at anew.

Knows files and versions; knows nothing about experiments.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mathinterp.models.cache import cache_folder, keep_sealed, read_sealed
from mathinterp.models.fast_tokenizer import QuickTokenizer, options_of, specials_of
from mathinterp.models.fingerprint import file_digests, model_fingerprint, quantised_fingerprint
from mathinterp.models.handle import unchanged
from mathinterp.models.quantised import check_quantised
from mathinterp.models.resolved import ResolvedModel, resolve_dtype
from mathinterp.models.shape import ModelShape, Positions
from mathinterp.models.sources import NAMES, Source, find_adapter, find_source
from mathinterp.models.spec import ModelSpec
from mathinterp.versions import source_digest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

READ = ("transformers", "tokenizers", "torch", "peft", "accelerate", "safetensors", "gguf", "numpy")
REMEMBERED = 16  # models of one ``Resolving``: a tokenizer takes 6.5 MB with 32,000 tokens, more with more
SMALL_FILES = {".json", ".txt", ".model", ".jinja", ".py"}  # of a model's folder, beside its weights


def has_files(spec: Any) -> bool:
    """Whether a model's files here tell what it is.

    Args:
        spec: a ``ModelSpec``, or anything with its fields.
    """
    if getattr(spec, "trust_remote_code", True):  # True: a model in memory
        return False
    return spec.name in NAMES or Path(spec.name).expanduser().exists()  # the hub is asked once, not twice


def decides(source: Source, adapter: Path | None) -> list[Any]:
    """What a model with these files is read as follows from this alone; plain JSON."""
    return [
        sys.version, {name: _version(name) for name in READ}, source_digest(), model_fingerprint(source, adapter),
        _small_files(source, adapter),
    ]  # fmt: skip


@dataclass(frozen=True)
class RecalledModel(ResolvedModel):
    """As ``resolve`` found it; its config is read when somebody asks for it, which imports transformers and torch."""

    config: "PreTrainedConfig" = field(init=False, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        """``config``, the first time."""
        if name != "config":
            raise AttributeError(name)
        from mathinterp.models.catalog import resolve

        object.__setattr__(self, "config", resolve(replace(self.spec, load_in=None)).config)
        return self.config


def look_up(spec: ModelSpec, device_type: str) -> ResolvedModel:
    """What ``catalog.resolve`` finds, for a model that is loaded elsewhere; raises UserError as that does.

    To quantise it, bitsandbytes is needed only there.
    """
    if spec.load_in is not None:
        whole = look_up(replace(spec, load_in=None), device_type)
        check_quantised(spec, whole.source, device_type, elsewhere=True)
        fingerprint = quantised_fingerprint(whole.fingerprint, spec.load_in)
        return replace(whole, spec=spec, label=spec.label, fingerprint=fingerprint)
    if not has_files(spec):
        return _resolve(spec, device_type)
    dtype = resolve_dtype(spec.dtype, device_type)
    adapter = None if spec.adapter is None else find_adapter(spec.adapter)
    source = find_source(spec.name)
    key = _key(source, adapter)
    kept = read_sealed(_file(key), key)
    if kept is None:
        found = _resolve(spec, device_type)
        _keep(found, key)
        return found
    facts = json.loads(kept)
    tokenizer = cast("PreTrainedTokenizerBase", QuickTokenizer(**facts["tokenizer"]))
    return RecalledModel(
        spec=spec, source=source, adapter=adapter, tokenizer=tokenizer, shape=_shape(facts["shape"]), dtype=dtype,
        label=spec.label,
        fingerprint=model_fingerprint(source, adapter),
    )  # fmt: skip


class Resolving:
    """A way of finding models, gone again only where the model's files have changed, or another model is wanted.

    Args:
        resolve: ``catalog.resolve``, for whoever loads the model, or ``look_up``.
    """

    def __init__(self, resolve: Callable[[ModelSpec, str], ResolvedModel] = look_up) -> None:
        self._resolve = resolve
        self._known: dict[tuple[ModelSpec, str], ResolvedModel] = {}  # asked for longest ago first

    def __call__(self, spec: ModelSpec, device: str, wanted: str | None = None) -> ResolvedModel:
        """Raises UserError as ``catalog.resolve`` does.

        Args:
            wanted: fingerprint of what whoever asks has found: a name may mean other files by now.
        """
        known = self._known.pop((spec, device), None)
        if known is None or wanted not in (None, known.fingerprint) or not unchanged(known):
            known = self._resolve(spec, device)
        self._known[spec, device] = known
        for old in list(self._known)[:-REMEMBERED]:
            self._known.pop(old, None)  # by another thread perhaps
        return known


def _resolve(spec: ModelSpec, device_type: str) -> ResolvedModel:
    from mathinterp.models.catalog import resolve

    return resolve(spec, device_type)


def _key(source: Source, adapter: Path | None) -> str:
    return hashlib.blake2b(json.dumps(decides(source, adapter)).encode(), digest_size=16).hexdigest()


def _file(key: str) -> Path:
    return cache_folder() / "models" / key


def _keep(found: ResolvedModel, key: str) -> None:
    """Unless its files changed meanwhile, or its tokenizer is of a class that is more than its parts."""
    kept = _tokenizer_facts(found.tokenizer)
    if kept is not None and _key(found.source, found.adapter) == key:
        keep_sealed(_file(key), key, json.dumps({"shape": dataclasses.asdict(found.shape), "tokenizer": kept}))


def _tokenizer_facts(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any] | None:
    from transformers import PreTrainedTokenizerFast

    if type(tokenizer) is not PreTrainedTokenizerFast:
        return None
    return {
        "backend": tokenizer.backend_tokenizer.to_str(), "options": {**options_of(tokenizer), **specials_of(tokenizer)}
    }  # fmt: skip


def _shape(facts: dict[str, Any]) -> ModelShape:
    windows, positions = tuple(facts["attention_windows"]), Positions(**facts["positions"])
    return ModelShape(**{**facts, "attention_windows": windows, "positions": positions})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _small_files(source: Source, adapter: Path | None) -> list[list[str]]:
    """Name and digest of every small file that loading may look at."""
    folders = [folder for folder in (source.path, adapter) if folder is not None and folder.is_dir()]
    files = [
        file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in SMALL_FILES and file.is_file()
    ]
    return [[file.name, digest] for file, digest in zip(files, file_digests(files), strict=True)]
