"""Options that several commands share, and how their text becomes values."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mathinterp.errors import UserError

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_STORE = "results"


def apply(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """A decorator that adds ``options``, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _known_engine(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse an unknown engine here: the scan itself would only do so in a replica that has loaded its model."""
    from mathinterp.forward.engine import ENGINES

    if value not in ENGINES:
        raise UserError(f"--engine '{value}' is not known; take one of {', '.join(ENGINES)}")
    return value


def model_options() -> Callable[[Command], Command]:
    """--model, --adapter, --dtype, --trust-remote-code."""
    return apply(
        [
            click.option(
                "--model", default="bundled", show_default=True,
                help="Bundled name, local folder, .gguf file, hub id or random:<shape>; see 'mathinterp models'.",
            ),
            click.option("--adapter", default=None, help="PEFT LoRA folder, or the name of a bundled adapter."),
            click.option(
                "--dtype", default="auto", show_default=True,
                help="float32, bfloat16, float16 or float64; auto is float32 on CPU, bfloat16 on GPU.",
            ),
            click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the model."),
        ]
    )  # fmt: skip


def prompt_options() -> Callable[[Command], Command]:
    """--prompts, --limit, --seed."""
    return apply(
        [
            click.option(
                "--prompts", "prompt_name", default="two_digit", show_default=True,
                help="Prompt set, JSON-lines file, or svamp:PATH and the like; see 'mathinterp prompts --list'.",
            ),
            click.option("--limit", type=int, default=None, help="At most so many prompts, spread over the templates."),
            click.option(
                "--seed", type=click.IntRange(min=0), default=0, show_default=True,
                help="Seed of the prompts' operands.",
            ),
        ]
    )  # fmt: skip


def store_option() -> Callable[[Command], Command]:
    """--store."""
    return click.option(
        "--store", default=DEFAULT_STORE, show_default=True, help="Results: a folder, or an s3:// or gs:// URL."
    )


def cluster_options() -> Callable[[Command], Command]:
    """--address, --replicas, --gpus-per-replica."""
    return apply(
        [
            click.option("--address", default=None, help="Running Ray cluster; without it a local Ray is started."),
            click.option("--replicas", type=int, default=None, help="Default: one a GPU, else one a CPU core."),
            click.option("--gpus-per-replica", type=float, default=None, help="1, a fraction, or 0 for CPU."),
        ]
    )  # fmt: skip


def ablation_options() -> Callable[[Command], Command]:
    """--ablation, --positions, --scoring, --layers, --engine."""
    return apply(
        [
            click.option(
                "--ablation", default="zero", show_default=True,
                help="zero; mean over the counterfactual prompts; or resample from the paired counterfactual.",
            ),
            click.option("--positions", default=None, help="all or end; default: all for zero, else end."),
            click.option(
                "--scoring", default=None,
                help="token, first_token or exact_match; default token, or first_token when only END is edited.",
            ),
            click.option("--layers", default=None, help="Layers, for example 0-3,17; default all."),
            click.option(
                "--engine", default="auto", show_default=True, callback=_known_engine,
                help="auto, packed or plain (slow).",
            ),
        ]
    )  # fmt: skip


def json_option() -> Callable[[Command], Command]:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """ "0-3,17" -> (0, 1, 2, 3, 17); raises UserError for anything else."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise UserError(f"--layers '{text}' cannot be read; write it like 0-3,17")
        layers += range(int(low), int(high if dash else low) + 1)
    return tuple(sorted(set(layers)))


def parse_heads(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """ "17.22,14.19" -> ((14, 19), (17, 22)); raises UserError for anything else."""
    if text is None:
        return None
    heads = set()
    for part in text.split(","):
        layer, dot, head = part.strip().partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"--heads '{text}' cannot be read; write layer.head, like 17.22,14.19")
        heads.add((int(layer), int(head)))
    return tuple(sorted(heads))


def require_one(heads: str | None, layers: str | None) -> None:
    """Raise UserError if both choices are given: which of them should hold would be a guess."""
    if heads is not None and layers is not None:
        raise UserError("give --heads or --layers, not both")
