"""What a finished league says: a table of methods."""

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
