"""Small grids of operands, and the slow twin of operand maps: one sentence alone, its own pass, plain hooks."""

from collections.abc import Sequence
from operator import add, mul, sub

import numpy as np
import torch

from mathinterp.experiments.operand_map.grid import Grid
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt, TokenizedPrompt
from tests.tiny import tiny_tokenizer

OPERATIONS = {"add": ("+", add), "sub": ("-", sub), "mul": ("*", mul)}


def prompts_of(pairs: Sequence[tuple[int, int]], operation: str = "add") -> list[Prompt]:
    sign, answer = OPERATIONS[operation]
    return [
        Prompt(f"{a}{sign}{b}", f"{a} {sign} {b} =", str(answer(a, b)), operation, str(a), str(b), template="symbols")
        for a, b in pairs
    ]


def tiny_pairs(count: int = 100, seed: int = 0) -> list[TokenizedPrompt]:
    """Random pairs of one and two digits, as the tiny tokenizer reads them."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(10_000, count, replace=False)
    return tokenize_prompts(prompts_of([divmod(int(i), 100) for i in chosen]), tiny_tokenizer())


def full_grid(operation: str = "add", *, ordered: bool = False) -> Grid:
    """All pairs of operands, or those with a >= b."""
    a_P, b_P = (values.ravel() for values in np.meshgrid(np.arange(100), np.arange(100), indexing="ij"))
    if ordered:
        a_P, b_P = a_P[a_P >= b_P], b_P[a_P >= b_P]
    result_P = OPERATIONS[operation][1](a_P, b_P)
    return Grid(operation, np.arange(len(a_P)), a_P, b_P, result_P)


class Alone:
    """One sentence up to END in a pass of its own; what modules read and gave at its last token."""

    def __init__(self, anatomy: Anatomy, item: TokenizedPrompt):
        self.anatomy, self.token = anatomy, item.scored[0].token_id
        self.seen: dict[str, torch.Tensor] = {}
        handles = [self._listen("final", anatomy.final_norm), self._listen("embedding", anatomy.layers[0])]
        for layer in range(anatomy.shape.n_layers):
            handles += [
                self._listen(f"heads {layer}", anatomy.output_projection(layer)),
                self._listen(f"neurons {layer}", anatomy.down_projection(layer)),
            ]
        self.logits_V = anatomy.model(torch.tensor([item.input_ids[: item.end + 1]])).logits[0, -1]
        for handle in handles:
            handle.remove()

    def _listen(self, name: str, module: torch.nn.Module):
        def look(_, args, kwargs) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            assert name not in self.seen
            self.seen[name] = hidden[0, -1].clone()

        return module.register_forward_pre_hook(look, with_kwargs=True)

    def head_output(self, layer: int, head: int) -> torch.Tensor:
        """o_proj of the head's slice with all else at zero, less o_proj of nothing."""
        projection, width = self.anatomy.output_projection(layer), self.anatomy.shape.d_head
        values = self.seen[f"heads {layer}"]
        alone = torch.zeros_like(values)
        alone[head * width : (head + 1) * width] = values[head * width : (head + 1) * width]
        return projection(alone) - projection(torch.zeros_like(values))

    def share(self, vector_D: torch.Tensor) -> float:
        """The vector's part of the answer's centred logit, at the final norm's frozen scale."""
        norm, hidden = self.anatomy.final_norm, self.seen["final"]
        gain = norm.weight + (1 if "Gemma" in type(norm).__name__ else 0)
        centred = isinstance(norm, torch.nn.LayerNorm)
        about = hidden - hidden.mean() if centred else hidden
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        scale = float((about.square().mean() + eps).sqrt())
        moved = (vector_D - vector_D.mean() if centred else vector_D) * gain / scale
        logits_V = self.anatomy.unembedding.weight @ moved / self.anatomy.shape.logits_divisor
        return float(logits_V[self.token] - logits_V.mean())

    def centred_logit(self) -> float:
        """The answer's logit less the mean one, without a soft-cap and the biases of the final norm and unembedding."""
        cap, head, norm = self.anatomy.shape.logit_softcap, self.anatomy.unembedding, self.anatomy.final_norm
        logits_V = self.logits_V if cap is None else cap * torch.atanh(self.logits_V / cap)
        if getattr(norm, "bias", None) is not None:
            logits_V = logits_V - head.weight @ norm.bias
        if getattr(head, "bias", None) is not None:
            logits_V = logits_V - head.bias
        return float(logits_V[self.token] - logits_V.mean())
