"""The cells (cells.py) that a replica of any scan computes: the model's own passes over a few prompts."""

from collections.abc import Sequence

import torch

from mathinterp.engine.cells import Cells, evenly
from mathinterp.engine.hooks import caught_input
from mathinterp.engine.scores import answer_logits
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

PROMPTS = 4
LAST_TOKENS = 16  # of a prompt: logits of all tokens of a long one would be large


@torch.no_grad()
def model_cells(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt]) -> Cells:
    """The likeliest token, its logit and its log-probability after the last tokens of a few prompts, each alone.

    The shortest, the longest and some between: products of other sizes may take other kernels. The likeliest token is
    one of two that are close where replicas disagree about it, and so its logit is as far apart as they are.
    """
    by_length = sorted(prompts, key=lambda prompt: len(prompt.fed))
    parts = []
    for index in evenly(len(by_length), PROMPTS):
        tokens = torch.tensor([list(by_length[index].fed)], device=anatomy.device)
        with caught_input(anatomy.final_norm) as caught:
            anatomy.decoder(input_ids=tokens, use_cache=False)
        logits_TV = answer_logits(anatomy, caught[-1][0, -LAST_TOKENS:])
        logit_T, predicted_T = logits_TV.max(dim=1)
        logprob_T = logit_T - logits_TV.logsumexp(dim=1)
        parts.append(Cells.of([logit_T.cpu().numpy(), logprob_T.cpu().numpy()], predicted_T.cpu().numpy()))
    return Cells.joined(parts)
