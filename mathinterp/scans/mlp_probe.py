"""MLP probing: how alike each MLP's input and output at END are to operands and answer (paper B section 4.2).

Cosine similarity with W_U[A], W_U[B], W_U[C], where A, B, C are the first digit tokens of operand A, operand B and the
answer as they stand in the sentence. Three rows per (layer, prompt). Only prompts that the model answers rightly are
read, unless all are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import cosine_similarity

from mathinterp.errors import UserError
from mathinterp.forward.mlp_vectors import mlp_vectors, unembedding_rows
from mathinterp.forward.pairs import batches_of
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import TypedTokens, operand_spans, typed_tokens
from mathinterp.scans import tables
from mathinterp.scans.answered import kept_prompts
from mathinterp.scans.base import Scan, Shard, Subject

VECTORS = ("residual", "written")
TARGETS = ("a", "b", "c")
MEASURES = ("mlp_in", "mlp_out", "difference")
LAYERS_PER_FILE = 8


@dataclass
class ProbeState:
    """What a replica keeps between shards: P kept prompts, L layers, targets a, b, c, and the three measures M."""

    names: pa.Array  # P prompt ids
    cosine_PLCM: np.ndarray
    notes: dict[str, Any]


@dataclass(frozen=True)
class MlpProbe(Scan):
    """Probe the MLP of each of ``layers`` (all if None).

    vectors: "residual" (MLP_in = r_l, MLP_out = r_l + F_l) or "written" (the normed input, and F_l itself).
    fold_norm: the final norm's weight g is folded into W_U.
    keep_all: read prompts that the model answers wrongly, too.
    The third measure is that of MLP_out - MLP_in, which a cosine needs not have normalised first.
    """

    vectors: str = "residual"
    fold_norm: bool = False
    layers: tuple[int, ...] | None = None
    keep_all: bool = False

    name: ClassVar[str] = "probe"
    schemas: ClassVar[dict[str, pa.Schema]] = {"mlp_probe": tables.MLP_PROBE}

    def __post_init__(self) -> None:
        if self.vectors not in VECTORS:
            raise UserError(f"--vectors '{self.vectors}' is not known; take one of {', '.join(VECTORS)}")
        if self.layers == ():
            raise UserError("no MLPs to probe; name at least one layer, or leave --layers out for all")

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers to probe; raises UserError for one that does not exist."""
        layers = list(range(shape.n_layers)) if self.layers is None else sorted(set(self.layers))
        for layer in layers:
            shape.check_layer(layer)
        return layers

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        layers = None if self.layers is None else sorted(set(self.layers))
        return {
            "vectors": self.vectors,
            "fold_norm": self.fold_norm,
            "layers": layers,
            "keep_all": self.keep_all,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Files of eight layers; raises UserError for a prompt without operands, or whose text has others."""
        for item in prompts:
            if len(operand_spans(item.prompt)) < 2:
                raise UserError(
                    f"prompt '{item.prompt.prompt_id}': probing compares with both operands; set the fields operand_a"
                    " and operand_b"
                )
        layers = self.chosen(shape)
        return [
            Shard("mlp_probe", index, {"layers": layers[start : start + LAYERS_PER_FILE]})
            for index, start in enumerate(range(0, len(layers), LAYERS_PER_FILE))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One pass over the prompts serves all layers."""
        return len(prompts)

    def prepare(self, subject: Subject) -> ProbeState:
        """The choice of prompts, and one pass over them; the vectors become cosines at once."""
        anatomy = subject.anatomy
        assert subject.tokenizer is not None, "the operands' tokens need the tokenizer"
        prompts, notes = kept_prompts(subject, self.keep_all)
        targets = target_ids(prompts, typed_tokens(prompts, subject.tokenizer))
        cosine_PLCM = np.empty((len(prompts), anatomy.shape.n_layers, len(TARGETS), len(MEASURES)))
        for batch in batches_of([p.input_ids[: p.end + 1] for p in prompts], anatomy, subject.max_tokens):
            rows = batch.rows.cpu()
            ids_BC = targets[rows].to(anatomy.device)
            towards_BCD = unembedding_rows(anatomy, ids_BC.flatten(), self.fold_norm).unflatten(0, ids_BC.shape)
            before_BLD, after_BLD = mlp_vectors(anatomy, batch).input_and_output(self.vectors)
            found = [
                cosine_similarity(vectors_BLD[:, :, None], towards_BCD[:, None], dim=-1)
                for vectors_BLD in (before_BLD, after_BLD, after_BLD - before_BLD)
            ]
            cosine_PLCM[rows.numpy()] = torch.stack(found, dim=-1).cpu().numpy()
        return ProbeState(pa.array([item.prompt.prompt_id for item in prompts]), cosine_PLCM, notes)

    def run(self, state: ProbeState, shard: Shard) -> pa.Table:
        """Rows of the shard's layers."""
        return pa.concat_tables([_layer_rows(state, layer) for layer in shard.work["layers"]])

    def notes(self, state: ProbeState) -> dict[str, Any]:
        """How many prompts were given, answered rightly and kept."""
        return state.notes


def target_ids(prompts: Sequence[TokenizedPrompt], typed: Sequence[TypedTokens]) -> torch.Tensor:
    """P x 3 token ids: first digit tokens of operand A, operand B and the answer, as they stand in the sentence.

    Of a number in words the first token; a minus sign is passed over.
    """
    ids = []
    for item, tokens in zip(prompts, typed, strict=True):
        answer = next((token for token in item.scored if token.kind == "digit"), item.scored[0])
        operands = [item.input_ids[tokens.first_digit[name]] for name in ("operand_a", "operand_b")]
        ids.append([*operands, answer.token_id])
    return torch.tensor(ids)


def _layer_rows(state: ProbeState, layer: int) -> pa.Table:
    cosine_PCM = state.cosine_PLCM[:, layer].astype(np.float32)
    prompts, targets, _ = cosine_PCM.shape
    columns: dict[str, Any] = {
        "layer": np.full(prompts * targets, layer),
        "prompt_id": state.names.take(pa.array(np.repeat(np.arange(prompts), targets))),
        "target": pa.array(TARGETS).take(pa.array(np.tile(np.arange(targets), prompts))),
        **{name: cosine_PCM[..., i].ravel() for i, name in enumerate(MEASURES)},
    }
    schema = tables.MLP_PROBE
    return pa.Table.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in schema], schema=schema)
