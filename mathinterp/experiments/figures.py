"""What figures are: Altair charts with their data inside, for the report page, notebooks, PNG and SVG alike.

Text of a store is data, never a field's name or an expression. Nothing here sets the colour of text or background, so
that a page in dark colours can set them. Widths are those of a phone; further panels go beside or below.
"""

import csv
import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import altair as alt
import pandas as pd
import vl_convert

from mathinterp.errors import UserError
from mathinterp.experiments.results import Results
from mathinterp.local_files import whole_file
from mathinterp.text import printable

Figure: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart | alt.ConcatChart | alt.HConcatChart | alt.VConcatChart
Part: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart  # the last only by altair's annotations

WIDTH, HEIGHT = 250, 200  # pixels of a panel; with its axis it fits a phone of 360
COLUMNS = 3  # panels in a row
Rgb: TypeAlias = tuple[int, int, int]
GAIN, NOTHING, HARM = (
    (0, 114, 178),
    (236, 234, 230),
    (200, 71, 10),
)  # as on the report page, which has others for the dark
TITLE, SUBTITLE = 44, 56  # letters in a line
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
DOUBTS = 4  # under a title
MANY = 400  # rows from which data are CSV, a third of the size of JSON
EXPRESSIONS = {
    "": "format(datum.{0}, '.4~g')", "whole": "format(datum.{0}, ',d')", "text": "datum.{0}",
    "%": "format(100 * datum.{0}, '.4~g') + ' %'", "points": "format(100 * datum.{0}, '.4~g') + ' points'",
}  # fmt: skip
AXES = {"%": "~%", "points": "~%", "whole": ",d", "": ".6~g"}
INVISIBLE = "\u200b"  # before a text that Vega would look up among the properties of its objects
OF_OBJECTS = frozenset(
    ("constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString", "toString", "valueOf")
)
NO_ROWS = "the run has no rows to draw yet; the same command computes what is missing"


@dataclass(frozen=True)
class Tip:
    """A column of the data as people read it.

    unit: "%" or "points" of a fraction; "whole" or "text"; else a word after the number, or none.
    high: the column of the interval's upper end, where ``field`` is its lower one.
    """

    field: str
    title: str
    unit: str = ""
    high: str | None = None

    @property
    def expression(self) -> str:
        """Of Vega, of the fixed names of columns alone."""
        word = "" if self.unit in EXPRESSIONS else f" + ' {self.unit}'"
        form = EXPRESSIONS.get(self.unit, EXPRESSIONS[""])
        shown, known = form.format(self.field) + word, f"isValid(datum.{self.field})"
        if self.high is not None:
            number = EXPRESSIONS["%"].removesuffix(" + ' %'") if self.unit in ("%", "points") else EXPRESSIONS[""]
            shown = f"{number.format(self.field)} + ' to ' + {form.format(self.high)}{word}"
            known += f" && isValid(datum.{self.high})"
        return f"{known} ? {shown} : 'not known'"


OPERATION = Tip("operation", "operation", "text")
LAYER = Tip("layer", "layer", "whole")
N = Tip("n", "n", "whole")
Q = Tip("q", "q (Benjamini-Hochberg)")
SURE = Tip("sure", "sure", "text")


def interval(low: str, high: str, unit: str, title: str = "95 % interval") -> Tip:
    """The tooltip of an interval."""
    return Tip(low, title, unit, high)


# ---- data ----


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain JSON: numbers at four digits, null for what is none, text without what a program would obey."""
    return [dict(zip(frame.columns, map(plain, row), strict=True)) for row in frame.itertuples(index=False)]


def plain(value: Any) -> Any:
    """A value as the rows of a chart have it, for its domains and orders."""
    if isinstance(value, str):
        text = printable(value)
        return f"{INVISIBLE}{text}" if text in OF_OBJECTS or text.startswith("__") else text
    if pd.api.types.is_bool(value):
        return "yes" if value else "no"
    if value is None or pd.isna(value) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.4g}")


def data_of(frame: pd.DataFrame) -> alt.InlineData:
    """The data of a chart; raises UserError where there are no rows."""
    if frame.empty:
        raise UserError(NO_ROWS)
    rows = records(frame)
    if len(rows) < MANY:
        return alt.InlineData(values=rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    kinds = {name: "string" if any(isinstance(row[name], str) for row in rows) else "number" for name in rows[0]}
    return alt.InlineData(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=kinds))


def rows_of(figure: Figure) -> list[list[dict[str, Any]]]:
    """The rows of each of a chart's data sets, for tables beside it."""
    spec = figure.to_dict()
    kinds = dict(_kinds({name: part for name, part in spec.items() if name != "datasets"}))
    sets = spec.get("datasets", {})
    return [_read(rows, kinds[name]) if isinstance(rows, str) else rows for name, rows in sets.items()]


def _kinds(spec: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Data set -> kinds of its columns, of those that are CSV."""
    if isinstance(spec, dict) and "format" in spec and "name" in spec:
        yield spec["name"], spec["format"]["parse"]
    elif isinstance(spec, dict | list):
        for part in spec.values() if isinstance(spec, dict) else spec:
            yield from _kinds(part)


def _read(text: str, kinds: dict[str, str]) -> list[dict[str, Any]]:
    def value(name: str, cell: str) -> Any:
        return None if cell == "" else float(cell) if kinds[name] == "number" else cell

    return [{name: value(name, cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


def operations_of(rows: pd.DataFrame) -> list[str]:
    """The operations in the rows, 'all' first; raises UserError if there are no rows."""
    if rows.empty:
        raise UserError(NO_ROWS)
    return sorted(rows["operation"].unique(), key=lambda operation: (operation != "all", operation))


# ---- parts of charts ----


def with_tips(chart: alt.Chart, tips: Sequence[Tip]) -> alt.Chart:
    """The chart with these lines in the tooltip of each of its marks."""
    for tip in tips:
        chart = chart.transform_calculate(**{f"tip_{tip.field}": tip.expression})
    return chart.encode(tooltip=[alt.Tooltip(f"tip_{tip.field}:N", title=tip.title) for tip in tips])


def axis(unit: str, **more: Any) -> alt.Axis:
    """An axis of numbers in ``unit``; of points without the sign of per cent."""
    if unit == "points":
        return alt.Axis(labelExpr="format(100 * datum.value, '~g')", **more)
    return alt.Axis(format=AXES.get(unit, AXES[""]), **more)


def titled_axis(title: str, unit: str) -> str:
    """The words beside an axis, with the unit where the numbers do not have it."""
    return f"{title} ({unit})" if unit not in ("", "%", "whole") else title


def panels(part: Part, names: Sequence[str], field: str = "operation", columns: int = COLUMNS) -> Figure:
    """``part`` once for each name of ``field``, so many in a row; a page sets ``columns`` to its width."""
    data, part.data = part.data, alt.Undefined
    facet = alt.Facet(
        f"{field}:N", sort=[plain(name) for name in names], title=None, header=alt.Header(labelLimit=WIDTH)
    )
    drawn: Figure = part.facet(facet=facet, columns=columns, data=data).resolve_axis(x="independent", y="independent")
    return drawn


def titled(
    figure: Figure, results: Results, title: str, description: str, doubts: Sequence[str] = (), label: str = ""
) -> Figure:
    """The chart with its heading: the run, whether it is unfinished, and what makes its figures doubtful.

    Args:
        description: what it shows, for those who do not see it.
        doubts: warnings, as in the summary.
        label: for the file's name, where a run has several figures.
    """
    run = results.run
    assert run is not None, "a figure of no run"
    state = f"unfinished: {run['shards_done']} of {run['shards']} shards" if run["status"] != "finished" else ""
    more = [f"and {len(doubts) - DOUBTS} more cautions in the summary"] if doubts[DOUBTS:] else []
    about = [f"{run['model']}, {run['prompts']}", *([f"Caution, {state}"] if state else []), *doubts[:DOUBTS], *more]
    return headed(figure, title, description, about, label)


def headed(figure: Figure, title: str, description: str, about: Sequence[str] = (), label: str = "") -> Figure:
    """The chart with a title and lines under it."""
    lines = [line for text in about for line in wrapped(text, SUBTITLE)]
    heading = alt.TitleParams(text=wrapped(title, TITLE), subtitle=lines, anchor="start")
    said = " ".join(printable(text) for text in (title, description, *about[1:]) if text)
    figure = figure.properties(title=heading, description=said, usermeta={"label": label})
    drawn: Figure = figure.configure_range(diverging=[*_ramp(GAIN, NOTHING), *_ramp(NOTHING, HARM)[1:]])
    return drawn


def _ramp(low: Rgb, high: Rgb) -> list[str]:
    """Steps between two colours: between two alone Vega goes by way of other hues."""
    return [
        "#" + "".join(f"{round(start + (stop - start) * step / 16):02x}" for start, stop in zip(low, high, strict=True))
        for step in range(17)
    ]


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many letters; six of them, of text without an end."""
    return textwrap.wrap(printable(text), width, max_lines=6, placeholder=" ...", break_on_hyphens=False) or [""]


def label_of(figure: Figure) -> str:
    """What tells this figure of a run from its others; "" for the only one."""
    return str(figure.to_dict().get("usermeta", {}).get("label", ""))


# ---- files ----


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path``.png and ``path``.svg, never through a link and without a network; returns both."""
    spec: Any = figure.to_dict()
    png, svg = (path.with_name(path.name + suffix) for suffix in (".png", ".svg"))
    offline: dict[str, Any] = {"vl_version": VEGA_LITE, "allowed_base_urls": []}
    with whole_file(png) as temporary:
        temporary.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, **offline))
    with whole_file(svg) as temporary:
        temporary.write_text(vl_convert.vegalite_to_svg(spec, **offline), encoding="utf-8")
    return [png, svg]
