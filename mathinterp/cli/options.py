"""Options that several commands share, and how their text becomes values."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from mathinterp.cli import completing
from mathinterp.errors import UserError
from mathinterp.gates import MOST, MOST_SEED, URL, check_file, check_place, check_writable, real, shortened, whole
from mathinterp.local_files import resolved

if TYPE_CHECKING:
    from mathinterp.models.spec import ModelSpec

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")
Place = TypeVar("Place", str, os.PathLike[str], None)
SHORTEST_SILENCE = 10.0  # seconds; what does not answer for less may be busy
SILENCE_SAID = "mathinterp.hangs_after"  # in the context of a command that was given --hangs-after
DEFAULT_STORE = "results"
UPLOADS = "working_dir_files"  # where a Ray node unpacks the folders that jobs bring, and deletes them later


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


def given_here() -> list[click.Parameter]:
    """Of the command that runs, what was given on its command line."""
    context = click.get_current_context()
    sources = {each: context.get_parameter_source(each.name or "") for each in context.command.params}
    return [each for each, source in sources.items() if source == ParameterSource.COMMANDLINE]


def with_scratch(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse here to run where nothing temporary can be written: the packages that compute would fail as they load."""
    from mathinterp.cluster.temporary import require_scratch

    require_scratch()
    return value


def with_flags(message: str, options: Sequence[click.Parameter] = ()) -> str:
    """Fields that the library names in backticks, as flags: those of ``options``, else of the field's own name.

    A run to build on is --from in every command, whatever is taken from it.
    """
    flags = {str(each.name): each.opts[0] for each in options}

    def flag(field: re.Match[str]) -> str:
        own = "--from" if field[1].endswith("_from") else f"--{field[1].replace('_', '-')}"
        return flags.get(field[1], own)

    return re.sub(r"``?(\w+)``?", flag, message)


class Renamed(click.Option):
    """An option whose former names still work; help and reference do not show them."""

    def __init__(self, *given: Any, former: Sequence[str] = (), **settings: Any):
        super().__init__(*given, **settings)
        self.former = former

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Teach the parser all names."""
        super().add_to_parser(parser, ctx)
        parser.add_option(obj=self, opts=list(self.former), dest=self.name, action="store")


def run_option(former: str, field: str, help: str) -> Callable[[Command], Command]:
    """--from: the run that a command builds on."""
    return click.option(
        "--from", field, cls=Renamed, former=[former], default=None, metavar="RUN_ID", help=help,
        shell_complete=completing.run_id,
    )  # fmt: skip


class Whole(click.IntRange):
    """Whole numbers from ``least`` to ``most``."""

    def __init__(self, least: int = 0, most: float = MOST):
        super().__init__(min=least, max=int(most))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for anything else."""
        return _checked(self, whole, value, param, ctx)

    def _describe_range(self) -> str:
        return f"x>={self.min}" if self.max in (MOST, MOST_SEED) else super()._describe_range()


class Real(click.FloatRange):
    """Finite numbers of ``least`` or more, or above it."""

    def __init__(self, least: float | None = None, above: bool = False):
        super().__init__(min=least, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for anything else."""
        return _checked(self, real, value, param, ctx)

    def _describe_range(self) -> str:
        return "" if self.min is None else super()._describe_range()


def _checked(
    kind: Whole | Real, read: Callable[..., Any], value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> Any:  # fmt: skip
    try:
        number = read(value, least=-math.inf, most=math.inf)
    except ValueError as error:
        kind.fail(str(error), param, ctx)
    low = -math.inf if kind.min is None else kind.min
    if number < low or (kind.min_open and number == low) or (kind.max is not None and number > kind.max):
        kind.fail(f"{shortened(number)} is not in the range {kind._describe_range()}", param, ctx)
    return number


class _Place(click.ParamType):  # type: ignore[type-arg]
    """A file or folder, as a Path; click's own type asks the system before anything is checked."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; raises UserError for what is no place."""
        check_place(value, param.opts[0] if param else "path")
        return Path(value)


PLACE = _Place()


def lasting(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """Refuse what is no place, and one in the folder that a Ray job runs in: Ray deletes that some time after it."""
    if value is not None:
        _check_lasting(parameter, value, "a full path or an s3:// or gs:// URL")
    return value


def out_place(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """A folder or URL for what a command leaves. Refuse, before the work, a folder that could not be written after it:
    in a file, or without permission.
    """
    lasting(context, parameter, value)
    if value is not None and not URL.match(str(value)):
        check_writable(value, parameter.opts[0])
    return value


def out_folder(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """As out_place, of this machine: a URL, which would become a local folder of that name, is refused too."""
    if value is not None:
        _check_local(parameter, value)
        check_writable(value, parameter.opts[0])
    return value


def out_file(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """As out_folder, for a file; a device or a pipe is none."""
    if value is not None:
        _check_local(parameter, value)
        check_file(value, parameter.opts[0])
    return value


def place_to_read(context: click.Context, parameter: click.Parameter, value: Place) -> Place:
    """Refuse what can be no file or folder."""
    if value is not None:
        check_place(value, parameter.opts[0])
    return value


def _check_local(parameter: click.Parameter, value: str | os.PathLike[str]) -> None:
    if URL.match(str(value)):
        raise UserError(
            f"{parameter.opts[0]} '{shortened(value)}' is a URL; give a folder, and copy it there afterwards"
        )
    _check_lasting(parameter, value, "a full path")


def _check_lasting(parameter: click.Parameter, value: str | os.PathLike[str], instead: str) -> None:
    check_place(value, parameter.opts[0])
    if not URL.match(str(value)) and UPLOADS in resolved(Path(value).expanduser(), parameter.opts[0]).parts:
        raise UserError(
            f"{parameter.opts[0]} '{value}' is in the folder that Ray unpacked for this job and deletes after it;"
            f" give {instead}"
        )


def model_options() -> Callable[[Command], Command]:
    """--model, --adapter, --dtype, --load-in, --trust-remote-code."""
    return apply(
        [
            click.option(
                "--model", default="bundled", show_default=True, callback=place_to_read,
                shell_complete=completing.named(completing.models),
                help="Bundled name, local folder, .gguf file, hub id or random:<shape>; see 'mathinterp models'.",
            ),
            click.option(
                "--adapter", default=None, callback=place_to_read, shell_complete=completing.named(completing.adapters),
                help="PEFT LoRA folder, or the name of a bundled adapter.",
            ),
            click.option(
                "--dtype", default="auto", show_default=True,
                help="float32, bfloat16, float16 or float64; auto is float32 on CPU, bfloat16 on GPU.",
            ),
            click.option(
                "--load-in", type=click.Choice(["8bit", "4bit"]), default=None,
                help="Quantise the layers as they are loaded (bitsandbytes, on a GPU); --dtype is what is computed in.",
            ),
            click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the model."),
        ]
    )  # fmt: skip


def spec_of(options: dict[str, Any]) -> "ModelSpec":
    """The model that the options of ``model_options`` name, which ``options`` then lacks."""
    from mathinterp.models.spec import ModelSpec

    return ModelSpec(*(options.pop(name) for name in ("model", "adapter", "dtype", "trust_remote_code", "load_in")))


def prompt_options() -> Callable[[Command], Command]:
    """--prompts, --limit, --seed."""
    return apply(
        [
            click.option(
                "--prompts", "prompt_name", default="two_digit", show_default=True,
                shell_complete=completing.named(completing.prompt_sets),
                help="Prompt set, JSON-lines file, or svamp:PATH and the like; see 'mathinterp prompts --list'.",
            ),
            click.option(
                "--limit", type=Whole(1), default=None,
                help="At most so many prompts, spread over the templates.",
            ),
            click.option(
                "--seed", type=Whole(most=MOST_SEED), default=0, show_default=True,
                help="Seed of the prompts' operands.",
            ),
        ]
    )  # fmt: skip


def store_option() -> Callable[[Command], Command]:
    """--store."""
    return click.option(
        "--store", default=DEFAULT_STORE, show_default=True, callback=lasting, shell_complete=completing.folder,
        help="Results: a folder, or an s3:// or gs:// URL.",
    )  # fmt: skip


def cluster_options() -> Callable[[Command], Command]:
    """--address, --replicas, --gpus-per-replica, --hangs-after."""
    return apply(
        [
            click.option(
                "--address", default="local", envvar="RAY_ADDRESS", callback=with_scratch,
                help="Running Ray cluster; without it a local Ray is started.",
            ),
            click.option(
                "--replicas", type=Whole(1), default=None, help="Default: one per GPU, else one per CPU core."
            ),
            click.option(
                "--gpus-per-replica", type=Real(0), default=None,
                help="0 for CPU, a fraction, 1, or more: the model's layers lie on so many GPUs of one node.",
            ),
            click.option(
                "--hangs-after", type=Real(SHORTEST_SILENCE), default=None, expose_value=False, callback=set_silence,
                metavar="SECONDS",
                help="A replica in which nothing moves for so long (no computing, reading or writing) is replaced."
                " Default: 300.",
            ),
        ]
    )  # fmt: skip


def service_option(stays: str = "") -> Callable[[Command], Command]:
    """--service.

    Args:
        stays: a sentence about what the command does not ask of a service.
    """
    return click.option(
        "--service", default=None, envvar="MATHINTERP_SERVICE", metavar="URL", callback=without_silence,
        help="Compute at a running service ('mathinterp serve'), not --address. Default: MATHINTERP_SERVICE, if set."
        + stays,
    )  # fmt: skip


def without_silence(context: click.Context, parameter: click.Parameter, service: str | None) -> str | None:
    """Raise UserError for --service beside --hangs-after, whichever of them comes first."""
    if service is not None and SILENCE_SAID in context.meta:
        raise UserError("--hangs-after is said when the service is started; leave it out")
    return service


def set_silence(context: click.Context, parameter: click.Parameter, seconds: float | None) -> None:
    """For this command alone."""
    if seconds is not None:
        context.meta[SILENCE_SAID] = True
        without_silence(context, parameter, context.params.get("service"))
        from mathinterp.cluster import dispatch

        root = context.find_root()  # which ends also where another option is refused
        root.call_on_close(partial(setattr, dispatch, "SILENCE", dispatch.SILENCE))
        dispatch.SILENCE = seconds


def json_option() -> Callable[[Command], Command]:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
