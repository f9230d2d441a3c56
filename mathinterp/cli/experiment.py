"""One command for every experiment: its options are the experiment's fields, its output is the experiment's summary.

Knows fields and click; knows no experiment by name. ``scan NAME`` runs one, ``plan NAME`` says what that would cost.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli import completing
from mathinterp.cli.group import Group
from mathinterp.cli.options import (
    Command,
    Real,
    Renamed,
    Whole,
    cluster_options,
    json_option,
    model_options,
    out_folder,
    parameters_of,
    prompt_options,
    service_option,
    spec_of,
    store_option,
    with_flags,
)
from mathinterp.cli.output import console, print_json, print_line, print_sql_hint, print_table, warn
from mathinterp.cli.running import print_run, run_chosen, run_json
from mathinterp.cli.verbosity import verbosity_options
from mathinterp.errors import UserError
from mathinterp.experiments import Experiment, Results, Shown, Summary
from mathinterp.experiments.options import Option, options_of

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.models.catalog import LoadedModel
    from mathinterp.models.spec import ModelSpec


@cache  # of a class options never change, and a command line asks three times
def experiment_command(experiment: type[Experiment], run: Callable[..., None], verb: str = "scan") -> click.Command:
    """The command of an experiment; ``run`` gets the class and the parsed options.

    Args:
        verb: the group it is in, for the examples: ``scan`` or ``plan``.
    """
    defaults = {} if experiment.prompt_set is None else {"prompt_name": experiment.prompt_set}
    shared: list[Callable[[Any], Any]] = [model_options()]
    shared += [prompt_options()] if experiment.prompt_set is not None else []
    shared += [store_option(), cluster_options(), service_option()]
    shared += [drawing_option()] if experiment.draws() else []
    own = [*own_options(experiment), *own_options(experiment.show_options)]
    own += [_retired_option(name, instead) for name, instead in experiment.retired.items()]
    return ExperimentCommand(
        experiment.name,
        {"default_map": defaults},
        callback=partial(run, experiment),
        params=[*own, *parameters_of([*shared, json_option(), verbosity_options()])],
        help=_help(experiment, verb),
    )


class ExperimentCommand(click.Command):
    """A command whose mistakes name its options where the library names fields."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; raises UserError."""
        try:
            return super().invoke(ctx)
        except UserError as error:  # the group above no longer knows the options
            raise UserError(with_flags(str(error), self.params)) from error


def own_options(owner: type) -> list[click.Parameter]:
    """Click options of the settable fields of a dataclass."""
    return [_click_option(each, about, _type_of(owner, each.name)) for each, about in options_of(owner).values()]


def _retired_option(name: str, instead: str) -> click.Option:
    """An option that there was once: it says what to write instead."""
    flag, instead = with_flags(f"`{name}`"), with_flags(instead)

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            raise UserError(f"{flag} is no option any more: {instead}")

    return click.Option([flag], hidden=True, expose_value=False, callback=refuse, help=f"Gone: {instead}")


def _type_of(owner: type, name: str) -> Any:
    """The annotation of a field, evaluated where the class that has it was written; other fields' may need torch."""
    declaring = next(each for each in owner.__mro__ if name in inspect.get_annotations(each))
    annotation = inspect.get_annotations(declaring)[name]
    return eval(annotation, vars(sys.modules[declaring.__module__])) if isinstance(annotation, str) else annotation


def _click_option(each: dataclasses.Field[Any], about: Option, hint: Any) -> click.Option:
    flag = f"--{about.flag or each.name.replace('_', '-')}"
    text = with_flags(about.help) + (f" Default: {about.shown}." if about.shown else "")
    if hint is bool:
        flag += f"/--no-{flag[2:]}" if each.default else ""
        return click.Option([flag, each.name], is_flag=True, default=each.default, help=text)
    has_default = each.default is not dataclasses.MISSING
    default: dict[str, Any] = {"default": each.default} if has_default else {}  # click takes None for a given value
    return Renamed(
        [flag, each.name],
        former=[f"--{name}" for name in about.former],
        type=_click_type(about, hint),
        required=not has_default and each.default_factory is dataclasses.MISSING,
        show_default=has_default and each.default is not None and about.parse is None,
        multiple=hint == tuple[str, ...],
        metavar=about.metavar,
        shell_complete=completing.run_id if about.metavar == "RUN_ID" else None,
        help=text,
        **default,
    )


def _click_type(about: Option, hint: Any) -> click.ParamType | type:  # type: ignore[type-arg]  # generic since click 8.4 alone
    kinds = {kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)}
    if about.choices:
        return click.Choice([choice for choice in about.choices if choice is not None])
    if about.parse is not None:
        return Parsed(about.parse)
    if kinds == {int}:
        return Whole(int(about.least or 0), about.most)
    return Real(about.least) if kinds == {float} else str


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """Text that an option's own function reads; a default is passed through."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]):
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; raises UserError as the function does."""
        return self._parse(value) if isinstance(value, str) else value


def _help(experiment: type[Experiment], verb: str) -> str:
    paragraphs = with_flags(experiment.__doc__ or experiment.name).split("\n\n")
    text = "\n\n".join([paragraphs[0], *("\b\n" + _outdented(part) for part in paragraphs[1:])])
    lines = [f"  mathinterp {example.replace('scan ', verb + ' ', 1)}" for example in experiment.command_examples]
    return text + ("\n\n\b\nExamples:\n" + "\n".join(lines) if lines else "")


def _outdented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def drawing_option() -> Callable[[Command], Command]:
    """--out, for figures."""
    return click.option("--out", default=None, metavar="FOLDER", callback=out_folder, help="Also draw it: PNG and SVG.")


# ---- running ----


@dataclasses.dataclass(frozen=True)
class Said:
    """A run of an experiment, what it found, and the figures drawn of it."""

    experiment: Experiment
    run: "RunSummary"
    summary: Summary | None
    drawn: list[Path]


def run_experiment(experiment: type[Experiment], **options: Any) -> None:
    """Run, or resume, an experiment and what follows from it; say what it found. Exit code 1 if it is incomplete."""
    from mathinterp.store import Store

    chosen, shown, as_json, out = parse(experiment, options)
    spec, said = spec_of(options), list[Said]()
    following: Experiment | None = chosen
    while following is not None:
        run = run_chosen(following, spec=spec, shown=shown, **options)
        results = Results(Store(run.store), run.run_id, partial(_load, spec))
        with results.store.held(run.run_id if following.reads_own_rows else None):
            summary = type(following).summarize(results, shown) if run.rows or run.reused else None
            drawn = _draw(following, results, shown, out) if run.complete else []
        if summary is not None:
            results.store.require(run.run_id)  # else it was of nothing
        said.append(Said(following, run, summary, drawn))
        following = following.follow_up(results, shown) if run.complete else None
    for each in said:
        for warning in each.summary.warnings if each.summary else ():
            warn(warning)
    if as_json:
        print_json(_told(said))
    else:
        for each in said:
            print_summary(each.run.store, each.summary, each.drawn)
            print_run(each.run)
    if any(each.run.failed or not each.run.complete for each in said):
        sys.exit(1)


def _told(said: Sequence[Said]) -> dict[str, Any]:
    """The first run as JSON, and within it what followed."""
    first, *others = said
    key = first.experiment.follow_up_key
    told = {**run_json(first.run), **(dict(first.summary.data) if first.summary else {})}
    told |= {"figures": [str(path) for path in first.drawn]} if type(first.experiment).draws() else {}
    if others:
        return {**told, key or others[0].experiment.name: _told(others)}
    return told if key is None else {**told, key: None}


def parse(experiment: type[Experiment], options: dict[str, Any]) -> tuple[Experiment, Any, bool, Path | None]:
    """The experiment, what of it is shown, --json and --out; ``options`` keeps where and on what to run."""
    own = {name: options.pop(name) for name in options_of(experiment)}
    shown = {name: options.pop(name) for name in options_of(experiment.show_options)}
    out = options.pop("out", None)
    chosen = experiment(**own)
    return chosen, experiment.show_options(**shown), options.pop("as_json"), None if out is None else Path(out)


def print_summary(store: str, summary: Summary | None, drawn: Sequence[Path] = ()) -> None:
    """Tables and sentences in their order, figures, and the SQL to go on with."""
    if summary is None:
        return
    for part in summary.parts:
        if isinstance(part, Shown):
            print_table(part.printed, title=part.title)
        elif part:
            console.print(with_flags(part))
    for path in drawn:
        print_line(f"drawn: {path}")
    print_sql_hint(store, summary.queries)


def _draw(chosen: Experiment, results: Results, shown: Any, out: Path | None) -> list[Path]:
    if out is None or not type(chosen).draws():
        return []
    from mathinterp.experiments.figures import label_of, save
    from mathinterp.text import file_name

    figure = type(chosen).figure(results, shown)
    if figure is None:
        return []
    out.mkdir(parents=True, exist_ok=True)
    parts = [chosen.name, results.run_id, *([label] if (label := label_of(figure)) else [])]
    return list(save(figure, out / file_name("-".join(parts))))


def _load(spec: "ModelSpec") -> "LoadedModel":
    from mathinterp.models.catalog import load

    return load(spec)


class ExperimentGroup(Group):
    """A group with a command for every experiment; ``module:Class`` names one from outside the package.

    Args:
        run, verb: what a command does, see ``experiment_command``.
        others: commands that are none of an experiment.
    """

    def __init__(self, *, run: Callable[..., None], verb: str, others: Mapping[str, click.Command], **settings: Any):
        super().__init__(**settings)
        self._run, self._verb, self._others = run, verb, dict(others)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of experiments and of the group's other commands."""
        from mathinterp.experiments import registry

        shown = [name for name, experiment in registry.experiments().items() if experiment.on_command_line]
        return sorted({*shown, *self._others, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of that name, made now; None if there is none."""
        from mathinterp.experiments import registry

        if name in self._others:
            return self._others[name]
        if ":" not in name and name not in self.list_commands(ctx):
            return super().get_command(ctx, name)
        return experiment_command(registry.find(name), self._run, self._verb)
