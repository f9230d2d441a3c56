"""What a finished league says: a table of methods, and the figure of it."""

from matplotlib.figure import Figure

from mathinterp.experiments.figures import panels
from mathinterp.experiments.results import Results, Shown, Summary

AGREEMENT = ("spearman", "kendall", "spearman_absolute", "overlap_5", "overlap_10", "overlap_32", "prompt_correlation")
OF_CIRCUITS = ("cpr", "cmd")  # which the exact effects have, too
SHOWN = (*AGREEMENT, *OF_CIRCUITS)
COLUMNS = ", ".join(f"{name}, {name}_low, {name}_high" for name in SHOWN)


def summarize(results: Results) -> Summary:
    """Every method beside the exact effects, the one of best rank correlation first; intervals are in the JSON."""
    rows = results.rows(
        f"""SELECT method, {COLUMNS}, seconds, forwards, backwards, ranking_run, nodes, n FROM method_league
            WHERE run_id = $run ORDER BY method <> 'exact', spearman_absolute DESC"""
    )
    first = rows[0]
    printed = [
        {"method": row["method"], **{name: _with_half(row, name) for name in SHOWN},
         **{name: row[name] for name in ("seconds", "forwards", "backwards")}}
        for row in rows
    ]  # fmt: skip
    what = f"{first['nodes']} nodes, {first['n']} prompts"
    title = f"Agreement with exact patching over {what} (-+ half of the 95 % interval)"
    return Summary(
        parts=[
            Shown(title, printed),
            "spearman, kendall: rank correlations of mean effects with sign; spearman_absolute, overlap_K: of their"
            " size; prompt_correlation: on one prompt at a time. cpr, cmd: MIB's measures of the circuits that the"
            " method's scores rank (the larger, the smaller the better). forwards, backwards: passes over each prompt,"
            " without those of circuits.",
        ],
        data={"methods": rows},
        queries=[results.query("SELECT * FROM method_league WHERE run_id = $run ORDER BY spearman_absolute DESC")],
    )


def draw(results: Results) -> Figure:
    """Methods by measures: a panel a measure, a point and its interval a method; dashed: of the exact effects."""
    every = results.frame(f"SELECT method, {COLUMNS} FROM method_league WHERE run_id = $run ORDER BY spearman_absolute")
    exact, frame = every[every["method"] == "exact"], every[every["method"] != "exact"].reset_index(drop=True)
    figure, axes = panels(len(SHOWN))
    for axis, name in zip(axes, SHOWN, strict=True):
        known = frame[frame[name].notna()]
        half = known[f"{name}_high"] - known[name], known[name] - known[f"{name}_low"]
        axis.errorbar(known[name], known.index, xerr=[half[1], half[0]], fmt="o", capsize=3)
        ends = [*every[name].dropna(), *known[f"{name}_low"].dropna(), *known[f"{name}_high"].dropna()]
        axis.set(title=name, xlim=(min([0.0, *ends]), max([1.0, *ends]) + 0.02))
        if name in OF_CIRCUITS and exact[name].notna().any():
            axis.axvline(float(exact[name].iloc[0]), ls="--", color="grey")
        axis.set_yticks(frame.index, frame["method"] if name == SHOWN[0] else [""] * len(frame))
        axis.set_ylim(-0.5, len(frame) - 0.5)
        axis.grid(axis="x", alpha=0.3)
    figure.set_label("league")
    return figure


def _with_half(row: dict[str, object], name: str) -> str | None:
    """ "0.93 -+ 0.02"; the larger half where the range cuts the interval."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return None
    assert isinstance(value, float)
    if low is None or high is None:
        return f"{value:.2f}"
    assert isinstance(low, float)
    assert isinstance(high, float)
    return f"{value:.2f} -+ {max(high - value, value - low):.2f}"
