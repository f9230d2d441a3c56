"""A fingerprint of everything that decides what a model answers: weights, config, tokenizer and adapter.

Knows files and bytes; knows nothing about tensors. It does not depend on where the files lie or, for weight shards,
on what they are called, nor on the dtype the model will run in (which is recorded beside it). Cutting the same
weights into other shards does change it.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mathinterp.models.cache import cache_folder, keep_sealed, read_sealed
from mathinterp.models.sources import Source, tokenizer_files, weight_files
from mathinterp.prompts.json_lines import json_file

_PIECE = 64 * 2**20  # bytes hashed by one thread at a time
_SMALL = 2**20  # files up to this size are hashed anew each time
_RACY_SECONDS = 2.0  # a file changed so recently may change again without its time stamp moving
_THREADS = 8

# Fields that say where a file came from or how it was saved, not what the model computes.
_INERT_CONFIG = {
    "_name_or_path", "_commit_hash", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "_attn_implementation", "attn_implementation",
}  # fmt: skip
_INERT_TOKENIZER = {"name_or_path", "tokenizer_file", "is_local", "local_files_only", "chat_template", "backend"}
# The last three are read while an adapter is made, never when it is loaded; revision is of the base, whose files count.
INERT_ADAPTER = {
    "base_model_name_or_path", "inference_mode", "revision", "auto_mapping", "peft_version", "task_type",
    "lora_dropout", "runtime_config", "loftq_config", "eva_config", "corda_config",
}  # fmt: skip

_ADAPTER_SETS = ("target_modules", "exclude_modules")


def model_fingerprint(source: Source, adapter: Path | None = None, with_code: bool = False) -> str:
    """16 hex digits for a checkpoint on disk, with an adapter or without.

    Args:
        source: a folder or a GGUF file (which holds weights, config and tokenizer in one).
        adapter: a PEFT adapter folder, or None.
        with_code: also take the folder's Python files in, for models that run their own code.
    """
    parts: list[tuple[str, Any]] = []
    if source.kind == "gguf":
        parts.append(("gguf", file_digest(source.location)))
    else:
        folder = source.location
        parts.append(("weights", sorted(file_digests(weight_files(folder)))))
        parts.append(("config", plain_config(json_file(folder / "config.json"))))
        parts += [(f"tokenizer/{file.name}", _tokenizer_content(file)) for file in tokenizer_files(folder)]
        if with_code:
            code = sorted(folder.rglob("*.py"))  # modules may import others in folders below
            parts += [(f"code/{file.relative_to(folder).as_posix()}", file_digest(file)) for file in code]
    if adapter is not None:
        parts.append(("adapter weights", file_digest(adapter / "adapter_model.safetensors")))
        parts.append(("adapter config", _adapter_content(json_file(adapter / "adapter_config.json"))))
    content = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def quantised_fingerprint(fingerprint: str, load_in: str | None) -> str:
    """16 hex digits of a model and of how it is quantised; those of the model itself where it is not."""
    if load_in is None:
        return fingerprint
    return hashlib.blake2b(f"{fingerprint} {load_in}".encode(), digest_size=8).hexdigest()


def plain_config(fields: dict[str, Any]) -> dict[str, Any]:
    """A config without the fields that say where it came from or how it was saved."""
    return _without(fields, _INERT_CONFIG)


def in_order(fields: dict[str, Any]) -> dict[str, Any]:
    """An adapter's options with its sets of modules sorted, which PEFT writes in any order."""
    sets = {name: fields[name] for name in _ADAPTER_SETS if isinstance(fields.get(name), list)}
    return {**fields, **{name: sorted(members) for name, members in sets.items()}}


def file_digest(file: Path) -> str:
    """Hex digest of one file's content, from the cache when the file has not changed since."""
    return file_digests([file])[0]


def file_digests(files: Iterable[Path]) -> list[str]:
    """Hex digest of each file's content; pieces of all files are hashed side by side in threads."""
    files = list(files)
    entries = [_cache_entry(file) for file in files]
    known = [read_sealed(*entry) for entry in entries]
    pieces = [
        (index, offset)
        for index, file in enumerate(files)
        if known[index] is None
        for offset in range(0, max(file.stat().st_size, 1), _PIECE)
    ]
    combined = [hashlib.blake2b(digest_size=32) for _ in files]
    with ThreadPoolExecutor(_THREADS) as pool:
        # map() gives the pieces back in order, so each file's digest is the hash of its pieces' digests.
        for (index, _), digest in zip(pieces, pool.map(lambda p: _hash_piece(files[p[0]], p[1]), pieces), strict=True):
            combined[index].update(digest)
    digests = []
    for file, entry, remembered, fresh in zip(files, entries, known, combined, strict=True):
        if remembered is None and _cache_entry(file) == entry:  # not if it changed while it was read
            _remember(file, entry, fresh.hexdigest())
        digests.append(remembered or fresh.hexdigest())
    return digests


def _hash_piece(file: Path, offset: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return hashlib.blake2b(stream.read(_PIECE), digest_size=32).digest()


def _tokenizer_content(file: Path) -> Any:
    if file.name == "tokenizer_config.json":
        return _without(json_file(file), _INERT_TOKENIZER)
    return file_digest(file)


def _adapter_content(fields: dict[str, Any]) -> dict[str, Any]:
    """The options that decide what the adapter does; a way of initialising by name may change the base at loading."""
    drawn_anew = isinstance(fields.get("init_lora_weights"), bool)  # and then overwritten by the adapter's weights
    fields = in_order(fields)
    return _without(fields, INERT_ADAPTER | ({"init_lora_weights"} if drawn_anew else set()))


def _without(fields: dict[str, Any], inert: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in inert}


def _cache_entry(file: Path) -> tuple[Path, str]:
    """The cache file for ``file`` as it is now, and the key that its content must agree with."""
    status = file.stat()
    key = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return cache_folder() / "digests" / name, key


def _remember(file: Path, entry: tuple[Path, str], digest: str) -> None:
    status = file.stat()
    if status.st_size <= _SMALL or time.time() - max(status.st_mtime, status.st_ctime) < _RACY_SECONDS:
        return
    keep_sealed(*entry, digest)
