"""Fine-tunings in words: the card of what was learnt, and lines on the way.

Knows Markdown, JSON and the figures it is given; computes nothing.
"""

import json
from typing import Any

from mathinterp.tuning.answers import Evaluation
from mathinterp.tuning.sft import Row


def card(about: dict[str, Any]) -> str:
    """A short model card."""
    settings = "\n".join(f"- {name}: {json.dumps(value)}" for name, value in about["parameters"].items())
    looks = [f"- {when}: {evaluation_line(Evaluation(**about[when]))}" for when in ("before", "after") if about[when]]
    origin = f"\nHeads from {about['chosen_from']}.\n" if about["chosen_from"] else ""
    held_out = "\n".join(["", "On held-out data:", "", *looks, ""]) if looks else ""
    return f"""# {about["base"]}, {about["method"]} fine-tuning

{about["trained_parameters"]:,} parameters trained on {about["samples"]:,} samples of {about["data"]}
(base fingerprint {about["base_fingerprint"]}, {about["dtype"]}, {about["seconds"]} s on {about["device"]}).
{origin}{held_out}
Settings:

{settings}

Made by `mathinterp tune {about["command"]}`, run {about["run_id"]}.
"""


def row_line(row: Row, steps: int) -> str:
    """A row of tuning_runs for people."""
    return (
        f"step {row['step']}/{steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  {row['samples_per_second']:,.1f} "
        f"samples/s  {row['tokens_per_second']:,.0f} tokens/s  {row['memory'] / 2**30:.1f} GiB"
    )


def evaluation_line(found: Evaluation) -> str:
    """An evaluation for people: loss in nats a token, then shares of answer tokens and of whole answers."""
    return (
        f"loss {found.loss:.4f}, {100 * found.token_accuracy:.1f} % of {found.answer_tokens:,} answer tokens, "
        f"{100 * found.exact_match:.1f} % of {found.samples:,} answers right"
    )
