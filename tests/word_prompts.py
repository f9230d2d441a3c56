"""Prompts that are no arithmetic, and the slow twin of what is measured on them: one prompt, one pass, one hook."""

import numpy as np
import torch

import mathinterp as mi

MODEL = mi.load("bundled", device="cpu", dtype="float64")
WORDS = [
    {"text": "two plus three is", "answer": "five", "distractor": "six", "counterfactual": "two times three is"},
    {"text": "four plus three is", "answer": "seven", "distractor": "six", "counterfactual": "four times three is"},
    {"text": "nine plus one is", "answer": "ten", "distractor": "nine", "counterfactual": "nine times one is"},
]
NAMED = [{**row, "token_types": {"subject": str(row["text"]).split()[0]}} for row in WORDS]
TWO_DIGITS = [{"text": "14 plus 5 is", "answer": "19", "distractor": "15"}]  # they differ in the second token
HEAD = (0, 6)


def logits_of(loaded, item, head: tuple[int, int] | None = None, value: torch.Tensor | None = None) -> np.ndarray:
    """T V logits of one prompt; the head's output replaced by ``value`` at END, or by 0 everywhere."""
    anatomy, handles = loaded.anatomy, []
    if head is not None:
        columns = anatomy.head_slice(head[1])

        def edit(module, inputs):
            changed = inputs[0].clone()
            if value is None:
                changed[..., columns] = 0
            else:
                changed[:, item.end, columns] = value
            return (changed, *inputs[1:])

        handles.append(anatomy.output_projection(head[0]).register_forward_pre_hook(edit))
    try:
        with torch.no_grad():
            return anatomy.model(torch.tensor([item.fed])).logits[0].double().numpy()
    finally:
        for handle in handles:
            handle.remove()


def head_output(loaded, item) -> torch.Tensor:
    """What HEAD gives at END."""
    found = []
    projection = loaded.anatomy.output_projection(HEAD[0])
    handle = projection.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0][0, item.end]))
    logits_of(loaded, item)
    handle.remove()
    return found[0][loaded.anatomy.head_slice(HEAD[1])]


def difference(logits: np.ndarray, item) -> float:
    row = item.distractor.index - 1
    return float(logits[row, item.input_ids[item.distractor.index]] - logits[row, item.distractor.token_id])
