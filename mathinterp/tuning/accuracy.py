"""How well a model does arithmetic, by operation and digits, on operand pairs that training never shows.

Knows teacher-forced scoring (method.md section 1); knows nothing about how the model was made.
Shapes: B prompts, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.tuning.batches import encode, to_arrays
from mathinterp.tuning.examples import CELLS, Cell, held_out_prompts
from mathinterp.tuning.layout import padding_id

OPERATION_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


@dataclass(frozen=True)
class Accuracy:
    """One cell of the table; accuracies are shares between 0 and 1."""

    operation: str
    digits: int
    form: str
    prompts: int
    tokens: int  # scored answer tokens
    token_accuracy: float
    exact_match: float


@torch.inference_mode()
def accuracy_table(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cells: Sequence[Cell] = CELLS,
    prompts_per_cell: int = 500,
    seed: int = 0,
    batch_size: int = 500,
) -> list[Accuracy]:
    """Teacher-forced token accuracy and exact match of every cell, the model as it is (its dtype and device).

    An answer token is right iff it has the largest logit after the gold prefix; an answer matches iff all its
    tokens are right, which is what greedy decoding would write. The space token is not scored.
    """
    model.eval()
    table = []
    for cell in cells:
        prompts = held_out_prompts(cell, prompts_per_cell, seed)
        right, tokens, exact = 0, 0, 0
        for first in range(0, len(prompts), batch_size):
            chunk = encode(prompts[first : first + batch_size], tokenizer)
            input_ids_BT, _, scored_BT = to_arrays(chunk, padding_id(tokenizer))
            logits_BTV = model(input_ids=input_ids_BT.to(model.device), use_cache=False).logits
            predicted_BT = logits_BTV[:, :-1].argmax(-1).cpu()
            right_BT = predicted_BT == input_ids_BT[:, 1:]
            scored_BT = scored_BT[:, 1:]
            right += int((right_BT & scored_BT).sum())
            tokens += int(scored_BT.sum())
            exact += int((right_BT | ~scored_BT).all(1).sum())
        table.append(
            Accuracy(cell.operation, cell.digits, cell.form, len(prompts), tokens, right / tokens, exact / len(prompts))
        )
    return table


def as_markdown(table: Sequence[Accuracy]) -> str:
    """The table as Markdown, accuracies in per cent."""
    lines = ["| operation | digits | form | prompts | answer tokens | token accuracy % | exact match % |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in table:
        lines.append(
            f"| {row.operation} ({OPERATION_SIGNS[row.operation]}) | {row.digits} | {row.form} | {row.prompts} | "
            f"{row.tokens} | {100 * row.token_accuracy:.1f} | {100 * row.exact_match:.1f} |"
        )
    return "\n".join(lines)


def as_records(table: Sequence[Accuracy]) -> list[dict[str, object]]:
    """The table as plain dictionaries, for JSON."""
    return [asdict(row) for row in table]
