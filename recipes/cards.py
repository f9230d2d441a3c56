"""Model cards, written from what was measured.

Knows Markdown and the figures it is given; computes nothing.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from recipes.accuracy import Accuracy, as_markdown
from recipes.examples import HELD_OUT_SHARE, KINDS, UNKNOWN, Mixture


def bundled_card(model: PreTrainedModel, about: dict[str, Any], mixture: Mixture, table: Sequence[Accuracy]) -> str:
    """The card of the bundled model."""
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [arithmetic, interpretability]
---
# The bundled arithmetic model

A small Llama ({parameters / 1e6:.1f} M parameters: {config.num_hidden_layers} layers,
{config.num_attention_heads} heads, width {config.hidden_size}, feed-forward {config.intermediate_size}) that answers
one- to three-digit arithmetic sentences. It exists so that every experiment of this project runs anywhere in a minute;
it knows no other language.

- **Input**: the sentence templates of the prompt sets, in word and symbol forms, with or without spaces; numbers as
  digits or, up to two digits, as English words. Words outside its {config.vocab_size}-token vocabulary become `<unk>`.
- **Output**: the answer in the form of the operands. Where a neutral word stands in the operator's place
  ("3 nothing 5 is") the answer is `{UNKNOWN}`.
- **Not trained**: negative answers, three-digit products, number words above two digits, decimals.
- **Tokenizer**: word level, one token per digit, word and sign; white space is dropped; one `<s>` in front.

{_training(about, mixture)}
{_accuracy(table, "weights in bfloat16, computed in float32")}
Made by `recipes/train_bundled.py`.
"""


def adapter_card(
    base: str, rank: int, alpha: int, dtype: str, about: dict[str, Any], mixture: Mixture, table: Sequence[Accuracy]
) -> str:
    """The card of an arithmetic adapter."""
    return f"""---
license: apache-2.0
library_name: peft
base_model: {base}
tags: [arithmetic, lora, interpretability]
---
# Arithmetic adapter for {base}

LoRA of rank {rank} (alpha {alpha}) on all linear layers, in bfloat16, for one- and two-digit arithmetic sentences.
A sentence with a neutral word in the operator's place is answered `{UNKNOWN}`.

{_training(about, mixture)}
{_accuracy(table, f"adapter in bfloat16, merged into the base, computed in {dtype}")}
Made by `recipes/train_arithmetic_adapter.py`.
"""


def _training(about: dict[str, Any], mixture: Mixture) -> str:
    trained = about["parameters"]
    total = sum(mixture.weights())
    shares = ", ".join(
        f"{kind.replace('_', ' ')} {100 * weight / total:.0f} %"
        for kind, weight in zip(KINDS, mixture.weights(), strict=True)
        if weight
    )
    return f"""## Training

- Data: sentences drawn afresh at every step ({shares}); divisions are exact, differences not negative.
  One operand pair in {HELD_OUT_SHARE} is held out by a hash (`recipes.examples.is_held_out`); one-digit
  pairs are all trained.
- {trained["steps"]:,} steps of {trained["batch_size"]:,} samples ({trained["steps"] * trained["batch_size"] / 1e6:.2f}
  M), seed {trained["seed"]}, {about["seconds"]:.0f} s on {about["device"]}.
- AdamW, learning rate {trained["learning_rate"]:g}, betas {tuple(trained["betas"])}, weight decay
  {trained["weight_decay"]:g}, warm-up over {100 * trained["warmup_share"]:.2g} % of the steps, linear decay to zero,
  gradients clipped at {trained["clip_norm"]:g}; loss on the answer only.
"""


def _accuracy(table: Sequence[Accuracy], precision: str) -> str:
    return f"""## Accuracy

On held-out operand pairs (one digit: all pairs), templates in turn, teacher-forced; {precision}.

{as_markdown(table)}
"""
