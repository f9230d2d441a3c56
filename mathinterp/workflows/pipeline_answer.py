"""The answer of a whole pipeline, from the stored rows of its runs alone: key heads, what they do, whether they hold.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mathinterp.experiments.heads.summary import summarize as summarize_heads
from mathinterp.experiments.kept import kept_line
from mathinterp.experiments.mlp_probe.summary import summarize as summarize_probe
from mathinterp.experiments.paths import ShownNodes
from mathinterp.experiments.paths.summary import summarize as summarize_paths
from mathinterp.experiments.results import Results, Row, Shown
from mathinterp.experiments.thin_means import thin_mean_warnings
from mathinterp.models.units import Head
from mathinterp.store import Store
from mathinterp.store.query import arrow

VIEWS = (
    *("path_effects", "head_effects", "head_operations", "ranking_agreement", "attention_by_type", "paper_b_figure5"),
    *("knockout_bands", "knockout_halved", "paper_b_mlp_probe"),
)  # that the answer reads
CONTROLS = ("random", "random_layer")  # rankings of a knock-out that are drawn

Query = Callable[..., list[Row]]  # SQL, and values beside the ids of the runs: $heads, $paths, $attention, $probe


@dataclass(frozen=True)
class PipelineRuns:
    """The ids of a pipeline's runs, and the heads it describes (from described_heads).

    knockouts: name of the prompts -> run, the ranking's own prompts first.
    """

    heads: str
    paths: str
    knockouts: dict[str, str]
    attention: str
    probe: str
    described: tuple[Head, ...]

    @property
    def named(self) -> dict[str, str]:
        """Stage -> run id, in the order in which the stages ran."""
        knockouts = {f"knockout {prompts}": run for prompts, run in self.knockouts.items()}
        return {"heads": self.heads, "paths": self.paths, **knockouts, "attention": self.attention, "probe": self.probe}


@dataclass(frozen=True)
class Section:
    """One part of the answer: plain lines, and the tables behind them."""

    title: str
    lines: list[str]
    tables: list[Shown]


@dataclass(frozen=True)
class PipelineAnswer:
    """What the pipeline found, section by section, and queries to go on with."""

    sections: list[Section]
    warnings: list[str]
    queries: list[str]

    def as_json(self) -> Row:
        """What the command prints under --json."""
        sections = [
            {"title": s.title, "lines": s.lines, "tables": {table.title: table.rows for table in s.tables}}
            for s in self.sections
        ]
        return {"answer": sections, "warnings": self.warnings}


def described_heads(store: Store, run_id: str, top: int) -> tuple[Head, ...]:
    """The heads of a path scan that are worth a description: those that pass the threshold first, then by effect.

    At least ``top`` of them where there are as many heads; one that passes it in one operation is never left out,
    however sure its effect is.
    """
    rows = store.rows(
        """SELECT layer, head, bool_or(below) AS key, min(rank) FILTER (operation = 'all') AS rank FROM path_effects
           WHERE run_id = $run AND node = 'head' GROUP BY layer, head ORDER BY key DESC, rank""",
        {"run": run_id},
    )
    keys = sum(row["key"] for row in rows)
    return tuple(Head(row["layer"], row["head"]) for row in rows[: max(top, keys)])


def answer_pipeline(store: Store, runs: PipelineRuns) -> PipelineAnswer:
    """The answer of finished runs."""
    connection = store.connect(*VIEWS)
    ids = {"heads": runs.heads, "paths": runs.paths, "attention": runs.attention, "probe": runs.probe}

    def query(sql: str, **values: str) -> list[Row]:
        rows: list[Row] = arrow(connection, sql, {**ids, **values}).to_pylist()
        return rows

    heads, paths, probe = (Results(store, run) for run in (runs.heads, runs.paths, runs.probe))
    patched = summarize_paths(paths, ShownNodes())
    sections = [
        _which(query, runs, patched.data["verdict"], summarize_heads(heads).data["verdict"]),
        _rankings(query),
        _look_at(query, runs, kept_line(Results(store, runs.attention))),
        _holds(query, runs),
        _mlps(query, summarize_probe(probe).data["verdict"]),
    ]
    curve = "SELECT * FROM knockout_curve WHERE run_id = $run AND operation = 'all' ORDER BY ranking, seed, k"
    queries = [
        paths.query("SELECT * FROM path_effects WHERE run_id = $run AND operation <> 'all' AND key ORDER BY mean"),
        heads.query("SELECT * FROM head_operations WHERE run_id = $run AND serves IS NOT NULL"),
        paths.query("SELECT * FROM ranking_agreement WHERE run_id = $run AND operation = 'all'"),
        *(Results(store, run).query(curve) for run in runs.knockouts.values()),
    ]
    thin = [f"{name}: {line}" for name, run in runs.knockouts.items() for line in thin_mean_warnings(store, run)]
    return PipelineAnswer(sections, [*patched.warnings, *thin], queries)


def _which(query: Query, runs: PipelineRuns, patched: str, zeroed: str) -> Section:
    """Key heads, how few, and the operation that each serves."""
    operations = [
        row["operation"]
        for row in query(
            """SELECT operation FROM path_effects WHERE run_id = $paths
                GROUP BY operation ORDER BY operation = 'all' DESC, operation"""
        )
    ]
    found = query(
        """SELECT p.layer, p.head, p.operation, p.mean, p.key, h.drop, o.serves
            FROM path_effects AS p
            LEFT JOIN head_effects AS h ON h.run_id = $heads AND h.layer = p.layer AND h.head = p.head
                AND h.operation = p.operation
            LEFT JOIN head_operations AS o ON o.run_id = $heads AND o.layer = p.layer AND o.head = p.head
            WHERE p.run_id = $paths AND p.node = 'head'"""
    )
    cells = {(Head(row["layer"], row["head"]), row["operation"]): row for row in found}
    table = []
    for head in runs.described:
        of_head = {operation: cells[head, operation] for operation in operations}
        keys = [operation for operation, row in of_head.items() if row["key"]]
        row: Row = {"head": str(head), "key for": ", ".join(keys) or "-"}
        row |= {f"effect {operation}": cell["mean"] for operation, cell in of_head.items()}
        row |= {f"drop {op}": cell["drop"] for op, cell in of_head.items()}
        table.append(row | {"serves": of_head[operations[0]]["serves"] or "-"})
    title = (
        "effect: of path patching, % of its measure; drop: points of accuracy with the head zeroed;"
        " serves: the one operation in which the drop is over 5"
    )
    lines = [f"Path patching: {patched}", f"Zeroed one at a time: {zeroed}"]
    return Section("Key heads, and the operations they serve", lines, [_percent(title, table, ("effect", "drop"))])


def _rankings(query: Query) -> Section:
    """Whether path patching, ablation and attribution name the same heads."""
    table = query(
        """SELECT other_method AS "path patching against", heads, spearman, overlap_5 AS "top 5 shared",
               chance_5 AS "by chance", overlap_10 AS "top 10 shared", chance_10 AS "by chance (10)",
               overlap_20 AS "top 20 shared", chance_20 AS "by chance (20)"
            FROM ranking_agreement
            WHERE run_id = $paths AND method = 'path patching' AND operation = 'all'
              AND other_run_id IN ($heads, $paths)
            ORDER BY other_run_id = $heads DESC, other_method"""
    )
    lines = [
        f"Heads by path patching and by {row['path patching against']}: rank correlation"
        f" {_two(row['spearman'])} over {row['heads']} heads"
        + (f", {row['top 5 shared']} of the first 5 shared" if row["top 5 shared"] is not None else "")
        + "."
        for row in table
    ]
    return Section("Do other rankings name the same heads?", lines, [Shown("Agreement over all operations", table)])


def _percent(title: str, rows: list[Row], begin: tuple[str, ...]) -> Shown:
    """A table whose title says per cent, of the columns that begin so."""
    return Shown(title, rows, {name: "" for row in rows[:1] for name in row if name.startswith(begin)})


def _two(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _look_at(query: Query, runs: PipelineRuns, kept: str) -> Section:
    """What the described heads attend to from END, over all operations."""
    found = query(
        """SELECT layer || '.' || head AS head, token_type, mass FROM attention_by_type
            WHERE run_id = $attention AND operation = 'all'"""
    )
    looks = query(
        "SELECT head, operation, looks_at, looks_at_share FROM paper_b_figure5 WHERE run_id = $attention"
        " ORDER BY operation = 'all' DESC, operation"
    )
    order = ("bos", "operand_a", "operator", "operand_b", "equals", "other")
    types = (*order, *sorted({row["token_type"] for row in found} - {*order}))
    table, lines = [], []
    for layer, number in runs.described:
        name = f"{layer}.{number}"
        masses = {row["token_type"]: row["mass"] for row in found if row["head"] == name}
        at = {row["operation"]: row for row in looks if row["head"] == name}
        row: Row = {"head": name, **{kind: masses.get(kind) for kind in types}}
        row |= {"looks at": at["all"]["looks_at"], "in": at["all"]["looks_at_share"]}
        table.append(row | {op: cell["looks_at"] for op, cell in at.items() if op != "all"})
        lines.append(f"{name} {at['all']['looks_at']} ({100 * at['all']['looks_at_share']:.0f} % of prompts)")
    title = "END's attention by token type (% of its weight), and the type of the largest weight (in % of prompts)"
    told = [kept, f"Outside BOS they look at: {', '.join(lines)}."]
    return Section("What the heads look at", told, [_percent(title, table, (*types, "in"))])


def _holds(query: Query, runs: PipelineRuns) -> Section:
    """The ranking's heads out against random ones, on its own prompts and on others."""
    lines, table = [], []
    for prompts, run in runs.knockouts.items():
        bands = query("SELECT * FROM knockout_bands WHERE run_id = $run AND operation = 'all' ORDER BY k", run=run)
        curve = {(row["ranking"], row["k"]): row for row in bands}
        original = curve["effect", 0]["accuracy"]
        for k in [k for ranking, k in curve if ranking == "effect" and k]:
            row: Row = {"prompts": prompts, "k": k, "original": original}
            row["ranked heads out"] = curve["effect", k]["accuracy"]
            for control in CONTROLS:
                band = curve.get((control, k))
                row[control] = band["accuracy"] if band else None
                row[f"{control} least"] = band["lowest"] if band else None
            table.append(row)
        halved = {
            row["ranking"]: row["halved_at"]
            for row in query("SELECT * FROM knockout_halved WHERE run_id = $run AND operation = 'all'", run=run)
        }
        lines.append(f"{prompts}: {100 * original:.1f} % right; {_told(curve, halved)}.")
    title = "Accuracy (%) with k heads out, over all operations; random: mean of the draws, least: the lowest of them"
    return Section(
        "Do they hold, also on other data? (knock-out)",
        lines,
        [_percent(title, table, ("original", "ranked", *CONTROLS))],
    )


def _told(curve: dict[tuple[str, int], Row], halved: dict[str, int | None]) -> str:
    """Where accuracy has halved under the ranking and its controls, and whether chance ever does as much harm."""
    places, wins = [], []
    for name in ("effect", *CONTROLS):
        ks = [k for ranking, k in curve if ranking == name and k]
        if not ks:
            continue
        at = f"with {halved[name]} out" if halved[name] else f"nowhere up to {max(ks)}"
        places.append(f"{'the ranked heads' if name == 'effect' else name}: {at}")
        if name != "effect":
            won = sum(curve["effect", k]["accuracy"] < curve[name, k]["lowest"] for k in ks)
            wins.append(f"than in every {name} draw at {won} of {len(ks)} k")
    lost = f"; more is lost {', '.join(wins)}" if wins else ""
    return f"halved by {', '.join(places)}{lost}"


def _mlps(query: Query, probed: str) -> Section:
    """From which layer on the MLPs carry the answer: by probing, beside their path effects."""
    table = query(
        """SELECT p.layer, e.mean AS "path effect", e.below AS key, p.out_a, p.out_b, p.out_c,
               p.difference_c, p.leader
            FROM paper_b_mlp_probe AS p
            LEFT JOIN path_effects AS e ON e.run_id = $paths AND e.node = 'mlp' AND e.layer = p.layer
                AND e.operation = p.operation
            WHERE p.run_id = $probe AND p.operation = 'all' ORDER BY p.layer"""
    )
    moved = ", ".join(str(row["layer"]) for row in sorted(table, key=lambda r: r["path effect"] or 0) if row["key"])
    lines = [
        f"MLPs whose path effect is below -5 % over all operations, strongest first: {moved or 'none'}.",
        probed,
    ]
    title = "MLPs: path effect (%), and cosine of their output at END with operands A, B and answer C"
    return Section("Which MLPs carry the answer", lines, [_percent(title, table, ("path effect",))])
