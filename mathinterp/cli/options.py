"""Options that several commands share, and how their text becomes values."""

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mathinterp.errors import UserError
from mathinterp.models.units import Head, Neuron

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")
Place = TypeVar("Place", str, os.PathLike[str], None)
DEFAULT_STORE = "results"
UPLOADS = "working_dir_files"  # where a Ray node unpacks the folders that jobs bring, and deletes them later
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib leaves one slash of two
MOST_LAYERS = 10_000  # more than any model has


def apply(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """A decorator that adds ``options``, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def fields_of(owner: type[Value], options: dict[str, Any]) -> Value:
    """A dataclass from the options that have its fields' names, which ``options`` then lacks."""
    return owner(**{each.name: options.pop(each.name) for each in dataclasses.fields(owner) if each.name in options})  # type: ignore[arg-type]


def parameters_of(decorators: Iterable[Callable[[Any], Any]]) -> list[click.Parameter]:
    """The options that decorators would add to a command, in their order."""

    def collected() -> None:
        """Nothing: click keeps options on it."""

    apply(list(decorators))(collected)
    return list(reversed(collected.__click_params__))  # type: ignore[attr-defined]


def _known_engine(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse an unknown engine here: the scan itself would only do so in a replica that has loaded its model."""
    from mathinterp.engine import ENGINES

    if value not in ENGINES:
        raise UserError(f"--engine '{value}' is not known; take one of {', '.join(ENGINES)}")
    return value


def with_scratch(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse here to run where nothing temporary can be written: the packages that compute would fail as they load."""
    from mathinterp.cluster.temporary import require_scratch

    require_scratch()
    return value


def with_flags(message: str, options: Sequence[click.Parameter] = ()) -> str:
    """Fields that the library names in backticks, as flags: those of ``options``, else of the field's own name."""
    flags = {str(each.name): each.opts[0] for each in options}
    return re.sub(r"`(\w+)`", lambda field: flags.get(field[1], f"--{field[1].replace('_', '-')}"), message)


class FiniteRange(click.FloatRange):
    """Numbers in a range; inf and nan are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for anything else."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number


ABOVE_0 = FiniteRange(min=0, min_open=True)


def lasting(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """Refuse a place in the folder that a Ray job runs in: Ray deletes that one some time after the job."""
    _check_lasting(parameter, value, "a full path or an s3:// or gs:// URL")
    return value


def out_place(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """A folder or URL for what a command leaves. Refuse, before the work, a folder that could not be written after it:
    in a file, or without permission.
    """
    lasting(context, parameter, value)
    if value is not None and "://" not in str(value):
        _check_writable(parameter, Path(value))
    return value


def out_folder(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """As out_place, of this machine: a URL, which would become a local folder of that name, is refused too."""
    if value is not None:
        _check_lasting(parameter, value, "a full path")
        if URL.match(str(value)):
            raise UserError(f"{parameter.opts[0]} '{value}' is a URL; give a folder, and copy it there afterwards")
        _check_writable(parameter, Path(value))
    return value


def _check_lasting(parameter: click.Parameter, value: Place, instead: str) -> None:
    if value is not None and "://" not in str(value) and UPLOADS in Path(value).expanduser().resolve().parts:
        raise UserError(
            f"{parameter.opts[0]} '{value}' is in the folder that Ray unpacked for this job and deletes after it;"
            f" give {instead}"
        )


def _check_writable(parameter: click.Parameter, folder: Path) -> None:
    above = folder.expanduser().absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "may not be written to" if above.is_dir() else "is a file"
        raise UserError(f"{parameter.opts[0]} '{folder}' cannot be made: '{above}' {reason}; give another folder")


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
            click.option(
                "--limit", type=click.IntRange(min=1), default=None,
                help="At most so many prompts, spread over the templates.",
            ),
            click.option(
                "--seed", type=click.IntRange(min=0), default=0, show_default=True,
                help="Seed of the prompts' operands.",
            ),
        ]
    )  # fmt: skip


def store_option() -> Callable[[Command], Command]:
    """--store."""
    return click.option(
        "--store", default=DEFAULT_STORE, show_default=True, callback=lasting,
        help="Results: a folder, or an s3:// or gs:// URL.",
    )  # fmt: skip


def cluster_options() -> Callable[[Command], Command]:
    """--address, --replicas, --gpus-per-replica."""
    return apply(
        [
            click.option(
                "--address", default="local", envvar="RAY_ADDRESS", callback=with_scratch,
                help="Running Ray cluster; without it a local Ray is started.",
            ),
            click.option(
                "--replicas", type=click.IntRange(min=1), default=None, help="Default: one a GPU, else one a CPU core."
            ),
            click.option(
                "--gpus-per-replica", type=FiniteRange(min=0), default=None, help="1, a fraction, or 0 for CPU."
            ),
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


def set_level(level: int) -> None:
    """What the package logs: INFO what it does, WARNING what is doubtful, ERROR nothing."""
    logging.getLogger("mathinterp").setLevel(level)


def verbosity_options() -> Callable[[Command], Command]:
    """--verbose, --quiet: they set the level of the package's log."""

    def sets(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
        return lambda context, parameter, given: set_level(level) if given else None

    return apply(
        [
            click.option(
                "-v", "--verbose", is_flag=True, expose_value=False, callback=sets(logging.INFO),
                help="Also say what is being done, and show where an error comes from.",
            ),
            click.option(
                "-q", "--quiet", is_flag=True, expose_value=False, callback=sets(logging.ERROR),
                help="Print results and errors only: no progress, no warnings, no hints.",
            ),
        ]
    )  # fmt: skip


def add_verbosity(command: click.Command) -> None:
    """Give a command, and all that are made of it already, the options of ``verbosity_options``."""
    if not any(parameter.name == "verbose" for parameter in command.params):
        command.params += parameters_of([verbosity_options()])
    if isinstance(command, click.Group):
        for below in command.commands.values():
            add_verbosity(below)


def json_option() -> Callable[[Command], Command]:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def parse_layers(text: str | None, option: str = "--layers") -> tuple[int, ...] | None:
    """ "0-3,17" -> (0, 1, 2, 3, 17); raises UserError for anything else."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise UserError(f"{option} '{text}' cannot be read; write it like 0-3,17")
        last = int(high if dash else low)
        if last >= MOST_LAYERS:
            raise UserError(f"{option} '{text}': no model has a layer {last}")
        layers += range(int(low), last + 1)
    return tuple(sorted(set(layers)))


def parse_heads(text: str | None) -> tuple[Head, ...] | None:
    """ "17.22,14.19" -> ((14, 19), (17, 22)); raises UserError for anything else."""
    if text is None:
        return None
    heads = set()
    for part in text.split(","):
        layer, dot, head = part.strip().partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"--heads '{text}' cannot be read; write layer.head, like 17.22,14.19")
        heads.add(Head(int(layer), int(head)))
    return tuple(sorted(heads))


def parse_neurons(text: str, option: str = "--neurons") -> tuple[Neuron, ...]:
    """ "28.3696,13.7", or "28_3696" as paper A writes it -> ((28, 3696), (13, 7)), in the order given.

    Raises UserError for anything else; ``option`` is what its line names.
    """
    neurons = []
    for part in text.split(","):
        layer, dot, neuron = part.strip().replace("_", ".").partition(".")
        if not (dot and layer.isdecimal() and neuron.isdecimal()):
            raise UserError(f"{option} '{text}' cannot be read; write layer.neuron, like 28.3696")
        neurons.append(Neuron(int(layer), int(neuron)))
    return tuple(neurons)


def require_one(heads: str | None, layers: str | None) -> None:
    """Raise UserError if both choices are given: which of them should hold would be a guess."""
    if heads is not None and layers is not None:
        raise UserError("give --heads or --layers, not both")
