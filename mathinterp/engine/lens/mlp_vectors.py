"""What goes into and comes out of each MLP at END, and the unembedding of tokens: the vectors that probing compares.

"residual" vectors: MLP_in = r_l, the residual stream before the MLP, and MLP_out = r_l + F_l. "written" vectors:
MLP_in = the normed input that the MLP reads, MLP_out = F_l. F_l is what is added to the residual stream: in Gemma-2 the
MLP's output after the norm behind it. In parallel blocks (GPT-J, NeoX) the MLP does not see its layer's attention;
there too r_l = x_{l-1} + A_l (method.md section 5), so that r_l + F_l is the layer's output in every family.

Shape legend: B prompt of one batch, L layer, N token, T position, D model width.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from mathinterp.engine.hooks import watched
from mathinterp.engine.lens.lens import norm_parts, wide_dtype
from mathinterp.engine.pairs import Batch
from mathinterp.models.anatomy import Anatomy

TOLERATED_GAP = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the layer's largest output: r + F against it
TOLERATED_HALF_GAP = 2e-2


@dataclass(frozen=True)
class MlpVectors:
    """At END of each prompt and layer, in float32 (float64 for a float64 model)."""

    before_BLD: torch.Tensor  # r: the residual stream that the MLP adds to
    read_BLD: torch.Tensor  # the normed input that the MLP reads
    written_BLD: torch.Tensor  # F: what is added to the residual stream

    def input_and_output(self, vectors: str) -> tuple[torch.Tensor, torch.Tensor]:
        """MLP_in and MLP_out, B L D each; ``vectors`` is "residual" or "written"."""
        if vectors == "residual":
            return self.before_BLD, self.before_BLD + self.written_BLD
        return self.read_BLD, self.written_BLD


@torch.inference_mode()
def mlp_vectors(anatomy: Anatomy, batch: Batch) -> MlpVectors:
    """One pass over the batch.

    Raises AssertionError if r + F is not the layer's output: the family then adds something else.
    """
    rows: dict[tuple[str, int], list[torch.Tensor]] = {}
    layers = range(anatomy.shape.n_layers)
    with ExitStack() as hooks:
        for layer in layers:
            for name, (module, of_input) in _sites(anatomy, layer).items():
                kept = rows.setdefault((name, layer), [])
                hooks.enter_context(watched(module, of_input, batch.keeper(kept)))
        batch.forward(anatomy)
    assert all(len(kept) == 1 for kept in rows.values()), "a hook did not fire once"

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([rows[name, layer][0] for layer in layers], dim=1).to(wide_dtype(anatomy.dtype))

    parallel = anatomy.shape.parallel
    before_BLD = stacked("input") + stacked("attention") if parallel else stacked("before")
    found = MlpVectors(before_BLD, stacked("read"), stacked("written") * anatomy.shape.residual_multiplier)
    _check_sum(anatomy, found, stacked("output"))
    return found


def _sites(anatomy: Anatomy, layer: int) -> dict[str, tuple[nn.Module, bool]]:
    """Name -> module of a layer that is listened to, and whether to its input (else output)."""
    mlp, post_norm = anatomy.mlp(layer), anatomy.family.mlp_post_norm
    sites = {
        "read": (mlp, True),
        "written": (mlp if post_norm is None else getattr(anatomy.layers[layer], post_norm), False),
        "output": (anatomy.layers[layer], False),
    }
    if anatomy.shape.parallel:
        return sites | {"input": (anatomy.layers[layer], True), "attention": (anatomy.attention(layer), False)}
    return sites | {"before": (anatomy.stream_reader(layer), True)}


def _check_sum(anatomy: Anatomy, found: MlpVectors, output_BLD: torch.Tensor) -> None:
    gap = (found.before_BLD + found.written_BLD - output_BLD).abs().amax(dim=(0, 2))
    limit = TOLERATED_GAP.get(anatomy.dtype, TOLERATED_HALF_GAP) * output_BLD.abs().amax(dim=(0, 2))
    wrong = [layer for layer, good in enumerate((gap <= limit).tolist()) if not good]
    assert not wrong, (
        f"family '{anatomy.shape.model_type}': residual stream + MLP is not the output of layer {wrong[0]}"
        f" (off by {float(gap[wrong[0]]):.3g}); see mlp_post_norm and parallel in mathinterp/models/families.py"
    )


def unembedding_rows(anatomy: Anatomy, token_ids_N: torch.Tensor, fold_norm: bool) -> torch.Tensor:
    """W_U of the tokens: N D, in float32 (float64 for a float64 model); with ``fold_norm`` times the final norm's g."""
    weight_VD = anatomy.unembedding.get_parameter("weight").detach()
    rows_ND = weight_VD[token_ids_N].to(wide_dtype(anatomy.dtype))
    return rows_ND * norm_parts(anatomy, anatomy.final_norm).gain_D if fold_norm else rows_ND
