"""Two runs side by side: what differs between them, and their components' effects against each other.

Effects are means over prompts of what an experiment ranks its components by, per operation; 'all' is the unweighted
mean of the operations. A difference is the second run's effect less the first's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
import pandas as pd

from mathinterp.experiments import registry
from mathinterp.experiments.charts import node_map, signed_colour
from mathinterp.experiments.figures import (
    OPERATION,
    Figure,
    Tip,
    axis,
    data_of,
    headed,
    operations_of,
    panels,
    titled_axis,
    with_tips,
)
from mathinterp.experiments.results import Results, Row
from mathinterp.experiments.results import Shown as Table
from mathinterp.report.runs import Shown
from mathinterp.store import Store

PLACE = ["node", "layer", "head"]
EFFECTS = """WITH single AS (
                 SELECT v.node, v.layer, v.unit AS head, coalesce(p.operation, 'none') AS operation,
                        sum(v.{value}) / sum(v.n) AS effect
                 FROM ({values}) AS v JOIN run_records AS r ON r.run_id = $run
                 JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = v.prompt_id
                 GROUP BY ALL)
             SELECT * FROM single UNION ALL
             SELECT node, layer, head, 'all' AS operation, avg(effect) AS effect FROM single GROUP BY ALL"""
AGREEMENT = """SELECT method, operation, heads, spearman, overlap_10, chance_10 FROM {view}
               WHERE run_id = $run AND other_run_id = $other {same}
               ORDER BY method, operation <> 'all', operation"""


@dataclass(frozen=True)
class Comparison:
    """What the page says of two runs.

    lines: sentences: what is the same, what is not, and what cannot be compared.
    charts: name -> chart.
    """

    runs: tuple[Shown, Shown]
    lines: Sequence[str]
    charts: dict[str, Figure]
    agreement: Table | None


def compared(store: Store, first: Shown, second: Shown) -> Comparison:
    """Compare them as far as they can be."""
    names = short_names(first, second)
    lines = differences(first.record, second.record)
    measures = [_measure(run) for run in (first, second)]
    if None in measures:
        which = [name for name, measure in zip(names, measures, strict=True) if measure is None]
        ranking = f"{' and '.join(which)} {'rank' if len(which) > 1 else 'ranks'} no heads or MLPs"
        lines.append(f"Component by component they do not compare: {ranking}.")
        return Comparison((first, second), lines, {}, None)
    tables = [_effects(store, run) for run in (first, second)]
    both, why = matched(*tables, same_model=_same(first, second, "model_fingerprint"))
    lines.append(why)
    unit = "points" if measures == ["drop", "drop"] else ""
    charts = {"concentration": _concentration(tables, names, unit)} if not any(table.empty for table in tables) else {}
    if not both.empty:
        charts = {"scatter": _scatter(both, names, measures, unit), **charts}
        if measures[0] == measures[1]:
            charts = {"difference": _difference(both, names, unit), **charts}
        else:
            lines.append(
                f"They measure different things ({measures[0]}, {measures[1]}): there is no difference to map."
            )
    return Comparison((first, second), lines, charts, _agreement(store, first, second))


def short_names(first: Shown, second: Shown) -> tuple[str, str]:
    """What tells the two apart: the models, else the scans, else the prompts, else the run ids."""
    for field in ("model", "scan", "prompts"):
        if first.run[field] != second.run[field]:
            return str(first.run[field]), str(second.run[field])
    return f"run {first.run['run_id']}", f"run {second.run['run_id']}"


def differences(first: Row, second: Row) -> list[str]:
    """What is the same and what differs, by the records."""
    found = []
    for what, name, more in (("model", "model_fingerprint", ""), ("prompts", "prompts_fingerprint", " or tokens")):
        if first[name] == second[name]:
            found.append(f"The same {what}: {first[what]} ({first[name]}).")
        else:
            found.append(f"Different {what}{more}: {first[what]} ({first[name]}) and {second[what]} ({second[name]}).")
    for what, name in (("Scan", "scan"), ("Code", "code_version"), ("Result format", "result_format")):
        if first[name] != second[name]:
            found.append(f"{what}: {first[name]} and {second[name]}.")
    one, other = first["parameters"], second["parameters"]
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            found.append(f"Parameter {name}: {one.get(name)} and {other.get(name)}.")
    return found


def matched(first: pd.DataFrame, second: pd.DataFrame, *, same_model: bool) -> tuple[pd.DataFrame, str]:
    """The effects of components and operations that both runs have, and in words what they have in common.

    Of different models components match by their place, and only where both runs have the same ones.
    """
    places = [
        set(map(tuple, table[PLACE].drop_duplicates().astype(object).fillna(-1).to_numpy()))
        for table in (first, second)
    ]
    common = places[0] & places[1]
    none = first.iloc[:0].assign(first=[], second=[])
    if not common:
        return none, "They have no component in common: component by component they do not compare."
    if not same_model and places[0] != places[1]:
        return none, (
            f"The models' components do not match ({len(places[0])} and {len(places[1])}, other layers or heads):"
            " component by component they do not compare."
        )
    both = first.merge(second, on=[*PLACE, "operation"], suffixes=("_first", "_second"))
    both = both.rename(columns={"effect_first": "first", "effect_second": "second"})
    both["difference"] = both["second"] - both["first"]
    if both.empty:
        return none, "They have no operation in common: component by component they do not compare."
    if same_model:
        return both, f"{len(common)} components are in both."
    return both, (
        f"{len(common)} components are in both by their place; heads of one place in different models need not do"
        " the same, unless the one was tuned from the other."
    )


def _same(first: Shown, second: Shown, name: str) -> bool:
    return bool(first.record[name] == second.record[name])


def _measure(run: Shown) -> str | None:
    """What the experiment ranks heads and MLPs by; None: it ranks none."""
    ranking = registry.find(run.run["scan"]).node_ranking
    return ranking.means[0] if ranking is not None and ranking.most is None else None


def _effects(store: Store, run: Shown) -> pd.DataFrame:
    ranking = registry.find(run.run["scan"]).node_ranking
    assert ranking is not None
    sql = EFFECTS.format(values=ranking.values, value=ranking.means[0])
    return Results(store, run.run["run_id"]).frame(sql)


def _agreement(store: Store, first: Shown, second: Shown) -> Table | None:
    """How alike the two rank heads, by the views that say so."""
    same = _same(first, second, "model_fingerprint")
    view, both = ("ranking_agreement", "AND method = other_method") if same else ("head_transfer", "")
    sql = AGREEMENT.format(view=view, same=both)
    rows = Results(store, first.run["run_id"]).rows(sql, other=second.run["run_id"])
    return (
        Table("How alike they rank heads (rank correlation; heads among the first ten of both)", rows) if rows else None
    )


def _tips(names: tuple[str, str], unit: str) -> list[Tip]:
    return [OPERATION, Tip("first", names[0], unit), Tip("second", names[1], unit)]


def _difference(both: pd.DataFrame, names: tuple[str, str], unit: str) -> Figure:
    colour = signed_colour("difference", both["difference"], "difference", unit)
    drawn = node_map(both, colour, [Tip("difference", "difference", unit), *_tips(names, unit)])
    title = f"Difference: {names[1]} less {names[0]}"
    return headed(drawn, title, "Layers by heads, coloured by the difference of their effects.")


def _scatter(both: pd.DataFrame, names: tuple[str, str], measures: Sequence[str | None], unit: str) -> Figure:
    name = both["layer"].astype(str) + both["head"].map(lambda head: "" if pd.isna(head) else f".{int(head)}")
    chart = alt.Chart(data_of(both.drop(columns=["layer", "head"]).assign(name=both["node"] + " " + name)))
    titles = [titled_axis(f"{measure}, {name}", unit) for measure, name in zip(measures, names, strict=True)]
    points = chart.mark_point(filled=True, size=40).encode(
        x=alt.X("first:Q", title=titles[0], axis=axis(unit)), y=alt.Y("second:Q", title=titles[1], axis=axis(unit))
    )
    points = with_tips(points, [Tip("name", "component", "text"), *_tips(names, unit)])
    description = "Each component's effect in the one run against that in the other, a panel for each operation."
    drawn = panels(points.properties(width=250, height=220), operations_of(both))
    return headed(drawn, "Component by component", description)


def _concentration(tables: Sequence[pd.DataFrame], names: tuple[str, str], unit: str) -> Figure:
    """Effects over all operations, largest first: how few components carry them, also where they do not match."""
    parts = []
    for table, name in zip(tables, names, strict=True):
        every = table[table["operation"] == "all"].sort_values("effect", ascending=False, key=abs)
        parts.append(pd.DataFrame({"run": name, "rank": range(1, len(every) + 1), "size": every["effect"].abs()}))
    frame = pd.concat(parts)
    tips = [Tip("run", "run", "text"), Tip("rank", "rank", "whole"), Tip("size", "size of the effect", unit)]
    line = (
        alt.Chart(data_of(frame))
        .mark_line(point=True)
        .encode(
            x=alt.X("rank:Q", title="rank", scale=alt.Scale(type="log")),
            y=alt.Y("size:Q", title=titled_axis("size of the effect", unit), axis=axis(unit)),
            color=alt.Color("run:N", title=None, sort=list(names), legend=alt.Legend(orient="bottom")),
        )
    )
    drawn = with_tips(line, tips).properties(width=300, height=220)
    return headed(drawn, "How few components carry the effect", "Effects over all operations, largest first.")
