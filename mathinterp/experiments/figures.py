"""What figures share: Altair charts with their data inside, for the report page, notebooks, PNG and SVG alike.

Text of a store is data, never a field's name or an expression. Nothing here sets the colour of text or background, so
that a page in dark colours can set them. Widths are those of a phone; further panels go beside or below.
"""

import csv
import io
import math
import textwrap
from collections.abc import Sequence
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
TITLE, SUBTITLE = 44, 56  # letters in a line
MANY = 400  # rows from which data are CSV, a third of the size of JSON
MOST_CELLS = 8_000  # of a map; above it, operations together alone
MOST_READ = 300  # marks that a screen reader is told one by one
EXPRESSIONS = {
    "": "format(datum.{0}, '.4~g')", "whole": "format(datum.{0}, ',d')", "text": "datum.{0}",
    "%": "format(100 * datum.{0}, '.4~g') + ' %'", "points": "format(100 * datum.{0}, '.4~g') + ' points'",
}  # fmt: skip
AXES = {"%": "~%", "points": "~%"}
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
            number = EXPRESSIONS["%"].removesuffix(" + ' %'") if self.unit in AXES else EXPRESSIONS[""]
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
    """Rows as plain JSON: numbers at five digits, null for what is none, text without what a program would obey."""
    return [dict(zip(frame.columns, map(_plain, row), strict=True)) for row in frame.itertuples(index=False)]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if pd.api.types.is_bool(value):
        return "yes" if value else "no"
    if value is None or pd.isna(value) or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(value) if value == int(value) and abs(value) < 2**53 else rounded


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
    """The rows of each of a chart's data sets, for tests and tables beside it; from CSV as text."""
    sets = figure.to_dict().get("datasets", {}).values()
    return [rows if isinstance(rows, list) else list(csv.DictReader(io.StringIO(rows))) for rows in sets]


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
    return alt.Axis(format=AXES.get(unit, "~g"), **more)


def titled_axis(title: str, unit: str) -> str:
    """The words beside an axis, with the unit."""
    return f"{title} ({unit})" if unit and unit != "whole" else title


def panels(part: Part, names: Sequence[str], field: str = "operation", columns: int = COLUMNS) -> Figure:
    """``part`` once for each name of ``field``, so many in a row; a page sets ``columns`` to its width."""
    data, part.data = part.data, alt.Undefined
    facet = alt.Facet(f"{field}:N", sort=list(names), title=None, header=alt.Header(labelLimit=WIDTH))
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
    (run,) = results.rows("SELECT model, prompts, status, shards_done, shards FROM runs WHERE run_id = $run")
    state = f"unfinished: {run['shards_done']} of {run['shards']} shards" if run["status"] != "finished" else ""
    about = [f"{run['model']}, {run['prompts']}", *([f"Caution, {state}"] if state else []), *doubts]
    return headed(figure, title, description, about, label)


def headed(figure: Figure, title: str, description: str, about: Sequence[str] = (), label: str = "") -> Figure:
    """The chart with a title and lines under it."""
    lines = [line for text in about for line in wrapped(text, SUBTITLE)]
    heading = alt.TitleParams(text=wrapped(title, TITLE), subtitle=lines, anchor="start")
    said = " ".join(printable(text) for text in (title, description, *about[1:]) if text)
    return figure.properties(title=heading, description=said, usermeta={"label": label})


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many letters; six of them, of text without an end."""
    return textwrap.wrap(printable(text), width, max_lines=6, placeholder=" ...") or [""]


def label_of(figure: Figure) -> str:
    """What tells this figure of a run from its others; "" for the only one."""
    return str(figure.to_dict().get("usermeta", {}).get("label", ""))


# ---- charts ----


def signed_colour(field: str, values: pd.Series, title: str, unit: str = "", *, harm: str = "high") -> alt.Color:
    """A colour on both sides of 0, as far on the one as on the other.

    harm: "high" or "low": where the values are that cost something, so that these have one colour in all figures.
    """
    bound = float(values.abs().max())
    bound = bound if math.isfinite(bound) and bound > 0 else 1.0
    legend = _legend(unit, titled_axis(title, unit))
    scale = alt.Scale(domain=[-bound, bound], domainMid=0, nice=False, reverse=harm == "low")
    return alt.Color(f"{field}:Q", scale=scale, legend=legend)


def amount_colour(field: str, title: str, unit: str = "") -> alt.Color:
    """A colour from little to much."""
    return alt.Color(f"{field}:Q", legend=_legend(unit, titled_axis(title, unit)))


def _legend(unit: str, title: str) -> alt.Legend:
    shape: dict[str, Any] = {"orient": "bottom", "gradientLength": WIDTH - 50, "titleLimit": WIDTH + 40}
    if unit == "points":
        return alt.Legend(title=title, labelExpr="format(100 * datum.value, '~g')", **shape)
    return alt.Legend(title=title, format=AXES.get(unit, "~g"), **shape)


def node_map(
    frame: pd.DataFrame,
    colour: alt.Color,
    tips: Sequence[Tip],
    *,
    panel: str | None = "operation",
    dot: str | None = None,
) -> Figure:
    """Layers by heads, a panel for each operation; MLPs are a last column.

    Args:
        frame: columns node ("head" or "mlp"), layer, head, ``panel`` and those of colour and tooltips.
        dot: a column; where it is true, a dot.
    """
    if frame.empty:
        raise UserError(NO_ROWS)
    if len(frame) > MOST_CELLS and panel == "operation":
        frame = frame[frame["operation"] == "all"]
    heads, mlp = frame.loc[frame["node"] == "head", "head"], bool((frame["node"] == "mlp").any())
    places = [*(str(head) for head in range(int(heads.max()) + 1 if len(heads) else 0)), *(["MLP"] if mlp else [])]
    layers = [*range(int(frame["layer"].max()), -1, -1)]
    place = frame["head"].map(lambda head: "MLP" if pd.isna(head) else str(int(head)))
    name = frame["layer"].astype(int).astype(str).where(~place.eq("MLP"), "MLP " + frame["layer"].astype(str))
    name = name.where(place.eq("MLP"), name + "." + place)
    shown = frame.drop(columns=["node", "head"]).assign(place=place, name=name)
    title = "head (last column: MLP)" if mlp and len(heads) else "head"
    chart = alt.Chart(data_of(shown)).encode(
        x=alt.X("place:O", title=title, scale=alt.Scale(domain=places), axis=alt.Axis(labelAngle=0)),
        y=alt.Y("layer:O", title="layer", scale=alt.Scale(domain=layers)),
    )
    cells = with_tips(
        chart.mark_rect(aria=len(shown) <= MOST_READ).encode(color=colour), [Tip("name", "node", "text"), *tips]
    )
    size = {"width": min(WIDTH, max(110, 22 * len(places))), "height": min(320, max(60, 18 * len(layers)))}
    part: Part = cells.properties(**size)
    if dot is not None:
        dots = chart.mark_point(filled=True, fill="white", stroke="black", size=16, strokeWidth=1, tooltip=None)
        part = alt.layer(cells, dots.transform_filter(f"datum.{dot} === 'yes'"), data=chart.data).properties(**size)
    return part if panel is None else panels(part, _panel_names(frame, panel), panel)


def curves(
    frame: pd.DataFrame, x: Tip, y: Tip, band: tuple[str, str] | None, tips: Sequence[Tip], *,
    series: Tip | None = None, x_scale: Any = alt.Undefined, y_scale: Any = alt.Undefined, rule: str | None = None,
    ticks: Sequence[float] | None = None, panel: str | None = "operation", order: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """A line with points for each of a series, its interval as a band, a panel for each operation.

    Args:
        series: what tells lines apart. order: its names, as in the legend.
        rule: a column whose value is a dashed line across.
        ticks: of x, where they are not chosen.
    """
    data = data_of(frame)
    x_axis = axis(x.unit, values=list(ticks)) if ticks is not None else axis(x.unit, tickMinStep=1)
    across = alt.X(f"{x.field}:Q", title=titled_axis(x.title, x.unit), scale=x_scale, axis=x_axis)
    up = alt.Y(f"{y.field}:Q", title=titled_axis(y.title, y.unit), scale=y_scale, axis=axis(y.unit))
    base = alt.Chart(data).encode(x=across)
    if series is not None:
        names = list(order) or sorted(frame[series.field].unique())
        base = base.encode(color=alt.Color(f"{series.field}:N", sort=names, legend=names_legend(series.title)))
    layers: list[Any] = []
    if band is not None:
        shade = base.mark_area(opacity=0.2, tooltip=None)
        layers.append(shade.encode(y=alt.Y(f"{band[0]}:Q", title=titled_axis(y.title, y.unit)), y2=f"{band[1]}:Q"))
    if rule is not None:
        dashed = alt.Chart(data).mark_rule(strokeDash=[4, 3], opacity=0.6)
        layers.append(dashed.encode(y=alt.Y(f"{rule}:Q", aggregate="mean")))
    layers.append(base.mark_line(tooltip=None).encode(y=up))
    layers.append(with_tips(base.mark_point(filled=True, size=35).encode(y=up), tips))
    part = alt.layer(*layers, data=data).properties(width=WIDTH, height=HEIGHT)
    return part if panel is None else panels(part, _panel_names(frame, panel), panel)


def _panel_names(frame: pd.DataFrame, panel: str) -> list[str]:
    return operations_of(frame) if panel == "operation" else list(dict.fromkeys(frame[panel]))


def names_legend(title: str | None = None) -> alt.Legend:
    """Of names: below, two beside each other."""
    return alt.Legend(title=title, orient="bottom", columns=2, labelLimit=WIDTH // 2)


def intervals(
    frame: pd.DataFrame, name: Tip, value: Tip, ends: tuple[str, str] | None, tips: Sequence[Tip], *,
    order: Sequence[str] = (), series: Tip | None = None, panel: str | None = None, x_scale: Any = alt.Undefined,
    rule: float | None = None, columns: int = COLUMNS,
) -> Figure:  # fmt: skip
    """A line of the page for each name, with a point at its value and its interval.

    Args:
        order: of the names, from above.
        rule: a dashed line at this value.
    """
    names, data = list(order) or list(dict.fromkeys(frame[name.field])), data_of(frame)
    base = alt.Chart(data).encode(
        y=alt.Y(f"{name.field}:N", title=name.title, sort=names, axis=alt.Axis(labelLimit=110))
    )
    if series is not None:
        base = base.encode(color=alt.Color(f"{series.field}:N", legend=names_legend(series.title)),
                           yOffset=f"{series.field}:N")  # fmt: skip
    across = alt.X(f"{value.field}:Q", title=titled_axis(value.title, value.unit), scale=x_scale, axis=axis(value.unit))
    layers: list[Any] = []
    if rule is not None:
        layers.append(alt.Chart(data).mark_rule(strokeDash=[4, 3], opacity=0.6).encode(x=alt.datum(rule)))
    if ends is not None:
        line = base.mark_bar(size=3, opacity=0.6, tooltip=None)
        layers.append(
            line.encode(x=alt.X(f"{ends[0]}:Q", title=titled_axis(value.title, value.unit)), x2=f"{ends[1]}:Q")
        )
    layers.append(with_tips(base.mark_point(filled=True, size=60).encode(x=across), tips))
    height = max(
        40,
        (20 if len(names) < 12 else 12)
        * len(names)
        * (1 if series is None else max(1, frame[series.field].nunique()) * 0.6),
    )
    part = alt.layer(*layers, data=data).properties(width=WIDTH - 40, height=height)
    return part if panel is None else panels(part, _panel_names(frame, panel), panel, columns)


# ---- files ----


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path``.png and ``path``.svg, never through a link and without a network; returns both."""
    spec: Any = figure.to_dict()
    png, svg = (path.with_name(path.name + suffix) for suffix in (".png", ".svg"))
    offline: dict[str, Any] = {"vl_version": "6.4", "allowed_base_urls": []}
    with whole_file(png) as temporary:
        temporary.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, **offline))
    with whole_file(svg) as temporary:
        temporary.write_text(vl_convert.vegalite_to_svg(spec, **offline), encoding="utf-8")
    return [png, svg]
