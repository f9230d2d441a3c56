"""How well a model does arithmetic, by operation and digits, on operand pairs that training never shows.

Knows teacher-forced scoring (method.md section 1); knows nothing about how the model was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.tuning.answers import evaluate
from mathinterp.tuning.data import Sample
from mathinterp.tuning.layout import padding_id
from recipes.examples import CELLS, Cell, held_out_prompts

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


def accuracy_table(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cells: Sequence[Cell] = CELLS,
    prompts_per_cell: int = 500,
    seed: int = 0,
) -> list[Accuracy]:
    """Teacher-forced token accuracy and exact match of every cell, the model as it is (its dtype and device).

    An answer token is right iff it has the largest logit after the gold prefix; an answer matches iff all its
    tokens are right, which is what greedy decoding would write. The space token is not scored.
    """
    anatomy = Anatomy(model.eval())
    table = []
    for cell in cells:
        drawn = enumerate(held_out_prompts(cell, prompts_per_cell, seed))  # the same pair may be drawn twice
        prompts = tokenize_prompts([replace(prompt, prompt_id=str(i)) for i, prompt in drawn], tokenizer)
        samples = [Sample(one.input_ids, tuple(token.index for token in one.scored)) for one in prompts]
        found = evaluate(model, anatomy, samples, device=anatomy.device, pad_id=padding_id(tokenizer))
        figures = found.samples, found.answer_tokens, found.token_accuracy, found.exact_match
        table.append(Accuracy(cell.operation, cell.digits, cell.form, *figures))
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
