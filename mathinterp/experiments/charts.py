"""Charts that many figures are made of: maps of layers by heads, curves with bands, points with intervals.

Knows columns and units, not what they mean.
"""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from mathinterp.errors import UserError
from mathinterp.experiments.figures import (
    AXES,
    COLUMNS,
    HEIGHT,
    NO_ROWS,
    WIDTH,
    Figure,
    Part,
    Tip,
    axis,
    data_of,
    operations_of,
    panels,
    plain,
    titled_axis,
    with_tips,
)  # fmt: skip

MOST_CELLS = 8_000  # of a map; above it, operations together alone
MOST_READ = 300  # marks that a screen reader is told one by one
DASHED: dict[str, Any] = {"strokeDash": [4, 3], "opacity": 0.6}


def signed_colour(field: str, values: pd.Series, title: str, unit: str = "", *, harm: str = "high") -> alt.Color:
    """A colour on both sides of 0, as far on the one as on the other.

    harm: "high" or "low": where the values are that cost something, so that these have one colour in all figures.
    """
    bound = float(pd.to_numeric(values).abs().max())
    bound = float(f"{bound:.5g}") if math.isfinite(bound) and bound > 0 else 1.0
    scale = alt.Scale(domain=[-bound, bound], domainMid=0, nice=False, reverse=harm == "low")
    return alt.Color(f"{field}:Q", scale=scale, legend=_gradient(unit, titled_axis(title, unit)))


def amount_colour(field: str, title: str, unit: str = "") -> alt.Color:
    """A colour from little to much."""
    return alt.Color(f"{field}:Q", legend=_gradient(unit, titled_axis(title, unit)))


def _gradient(unit: str, title: str) -> alt.Legend:
    shape: dict[str, Any] = {"orient": "bottom", "gradientLength": WIDTH - 50, "titleLimit": WIDTH + 40}
    if unit == "points":
        return alt.Legend(title=title, labelExpr="format(100 * datum.value, '~g')", **shape)
    return alt.Legend(title=title, format=AXES.get(unit, AXES[""]), **shape)


def names_legend(title: str | None = None, names: Sequence[str] = ()) -> alt.Legend:
    """Of names: below, two beside each other where they are short."""
    columns = 1 if any(len(name) > 18 for name in names) else 2
    return alt.Legend(
        title=title, orient="bottom", columns=columns, labelLimit=WIDTH, symbolOpacity=1, symbolType="circle"
    )


def heat(
    frame: pd.DataFrame, x: Tip, y: Tip, colour: alt.Color, tips: Sequence[Tip], *, across: Sequence[Any],
    up: Sequence[Any], angle: int = 0, panel: str | None = None, dot: str | None = None,
) -> Figure:  # fmt: skip
    """A coloured cell for each row; where nothing was measured there is none.

    Args:
        across, up: every value of x from the left, and of y from below.
        dot: a column; where it is true, a dot.
    """
    chart = alt.Chart(data_of(frame)).encode(
        x=alt.X(f"{x.field}:O", title=x.title, scale=alt.Scale(domain=[plain(each) for each in across]),
                axis=alt.Axis(labelAngle=angle, labelLimit=90)),
        y=alt.Y(f"{y.field}:O", title=y.title, scale=alt.Scale(domain=[plain(each) for each in up][::-1]),
                axis=alt.Axis(labelLimit=90)),
    )  # fmt: skip
    cells = with_tips(chart.mark_rect(aria=len(frame) <= MOST_READ).encode(color=colour), tips)
    size = {"width": min(WIDTH, max(110, 22 * len(across))), "height": min(320, max(60, 18 * len(up)))}
    part: Part = cells.properties(**size)
    if dot is not None:
        dots = chart.mark_point(filled=True, fill="white", stroke="black", size=18, opacity=1, strokeWidth=1)
        dots = with_tips(dots.transform_filter(f"datum.{dot} === 'yes'"), tips)
        part = alt.layer(cells, dots, data=chart.data).properties(**size)
    return part if panel is None else panels(part, names_of(frame, panel), panel)


def node_map(
    frame: pd.DataFrame, colour: alt.Color, tips: Sequence[Tip], *, panel: str | None = "operation",
    dot: str | None = None,
) -> Figure:  # fmt: skip
    """Layers by heads; MLPs are a last column.

    Args:
        frame: columns node ("head" or "mlp"), layer, head, and those of panel, colour, dot and tooltips.
    """
    if frame.empty:
        raise UserError(NO_ROWS)
    if len(frame) > MOST_CELLS and panel == "operation":
        frame = frame[frame["operation"] == "all"]
    heads, mlp = frame.loc[frame["node"] == "head", "head"], bool((frame["node"] == "mlp").any())
    places = [*(str(head) for head in range(int(heads.max()) + 1 if len(heads) else 0)), *(["MLP"] if mlp else [])]
    place = frame["head"].map(lambda head: "MLP" if pd.isna(head) else str(int(head)))
    layer = frame["layer"].astype(int).astype(str)
    name = (layer + "." + place).where(place != "MLP", "MLP " + layer)
    shown = frame.drop(columns=["node", "head"]).assign(place=place, name=name)
    return heat(
        shown, Tip("place", "head (last column: MLP)" if mlp and len(heads) else "head"), Tip("layer", "layer"),
        colour, [Tip("name", "node", "text"), *tips], across=places, up=range(int(frame["layer"].max()) + 1),
        panel=panel, dot=dot,
    )  # fmt: skip


def curves(
    frame: pd.DataFrame, x: Tip, y: Tip, band: tuple[str, str] | None, tips: Sequence[Tip], *,
    series: Tip | None = None, x_scale: Any = alt.Undefined, y_scale: Any = alt.Undefined, points: bool = True,
    rule: str | Sequence[float] = (), ticks: Sequence[float] | None = None, panel: str | None = "operation",
    order: Sequence[str] = (), columns: int = COLUMNS,
) -> Figure:  # fmt: skip
    """A line with points for each of a series, its interval as a band, a panel for each operation.

    Args:
        series: what tells lines apart. order: its names, as in the legend.
        rule: dashed lines across: at the value of a column, or at numbers.
        ticks: of x, where they are not chosen.
    """
    data = data_of(frame)
    ticks = _ticks(frame[x.field]) if ticks is None and x.unit == "whole" else ticks
    x_axis = axis(x.unit) if ticks is None else axis(x.unit, values=list(ticks))
    title = titled_axis(y.title, y.unit)
    base = alt.Chart(data).encode(
        x=alt.X(f"{x.field}:Q", title=titled_axis(x.title, x.unit), scale=x_scale, axis=x_axis)
    )
    up = alt.Y(f"{y.field}:Q", title=title, scale=y_scale, axis=axis(y.unit))
    if series is not None:
        names = [plain(each) for each in order or sorted(frame[series.field].unique())]
        base = base.encode(
            color=alt.Color(f"{series.field}:N", sort=names, legend=names_legend(series.title or None, names))
        )
    layers: list[Any] = []
    if band is not None and frame[band[0]].notna().any():
        shade = base.mark_area(opacity=0.2, tooltip=None)
        layers.append(shade.encode(y=alt.Y(f"{band[0]}:Q", title=title), y2=f"{band[1]}:Q"))
    layers += _rules(data, rule, "y", title)
    layers.append(base.mark_line(tooltip=None).encode(y=up))
    if points:
        layers.append(with_tips(base.mark_point(filled=True, size=35).encode(y=up), tips))
    else:
        layers[-1] = with_tips(base.mark_line().encode(y=up), tips)
    part = alt.layer(*layers, data=data).properties(width=WIDTH, height=HEIGHT)
    return part if panel is None else panels(part, names_of(frame, panel), panel, columns)


def intervals(
    frame: pd.DataFrame, name: Tip, value: Tip, ends: tuple[str, str] | None, tips: Sequence[Tip], *,
    order: Sequence[Any] = (), series: Tip | None = None, panel: str | None = None, x_scale: Any = alt.Undefined,
    rule: str | Sequence[float] = (), columns: int = COLUMNS, own_names: bool = False,
) -> Figure:  # fmt: skip
    """A line of the page for each name, with a point at its value and its interval.

    Args:
        order: of the names, from above.
        own_names: each panel has names of its own, by their values.
        rule: dashed lines: at the value of a column, or at numbers.
    """
    names = [plain(each) for each in order or dict.fromkeys(frame[name.field])]
    data = data_of(frame)
    title = titled_axis(value.title, value.unit)
    kinds = 1 if series is None else frame[series.field].nunique()
    sort = alt.EncodingSortField(value.field, "max", "descending") if own_names else names
    base = alt.Chart(data).encode(
        y=alt.Y(f"{name.field}:N", title=name.title or None, sort=sort, axis=alt.Axis(labelLimit=110))
    )
    if series is not None and kinds > 1:
        legend = names_legend(series.title or None, list(frame[series.field].unique()))
        base = base.encode(color=alt.Color(f"{series.field}:N", legend=legend), yOffset=f"{series.field}:N")
    layers: list[Any] = _rules(data, rule, "x", title)
    if ends is not None:
        line = base.mark_bar(size=3, opacity=0.6, tooltip=None)
        layers.append(line.encode(x=alt.X(f"{ends[0]}:Q", title=title), x2=f"{ends[1]}:Q"))
    across = alt.X(f"{value.field}:Q", title=title, scale=x_scale, axis=axis(value.unit))
    layers.append(with_tips(base.mark_point(filled=True, size=50).encode(x=across), tips))
    lines = int(frame.groupby(panel)[name.field].nunique().max()) if own_names else len(names)
    line_height = (20 if lines < 12 else 13) * (1 + 0.6 * (kinds - 1))
    part = alt.layer(*layers, data=data).properties(width=WIDTH - 50, height=max(40, line_height * lines))
    if panel is None:
        return part
    figure = panels(part, names_of(frame, panel), panel, columns)
    return figure.resolve_scale(y="independent") if own_names else figure


def _rules(data: alt.InlineData, rule: str | Sequence[float], channel: str, title: str) -> list[Any]:
    if isinstance(rule, str):
        place = (alt.X if channel == "x" else alt.Y)(f"{rule}:Q", aggregate="mean", title=title)
        return [alt.Chart(data).mark_rule(**DASHED).encode(**{channel: place})]
    return [alt.Chart(data).mark_rule(**DASHED).encode(**{channel: alt.datum(at, title=title)}) for at in rule]


def _ticks(values: pd.Series) -> list[int]:
    """Whole numbers alone, not more than ten."""
    least, most = int(values.min()), int(values.max())
    return list(range(least, most + 1, 1 + (most - least) // 10))


def names_of(frame: pd.DataFrame, panel: str) -> list[str]:
    """The panels' names, in their order."""
    return operations_of(frame) if panel == "operation" else list(dict.fromkeys(frame[panel]))
