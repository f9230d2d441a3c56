"""Is a ranking stable? How the first nodes of a finished run change when prompts are drawn again from its own.

Bootstrap over prompts, and over templates with all their prompts, within each operation; from stored rows alone, for
every experiment that says how it ranks (``node_ranking``). docs/statistics.md says what the figures mean. A computation
is a run of its own, of scan ``stability``: the same scan, number of draws and seed are never drawn twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import finished_run
from mathinterp.experiments.ranking import Ranking
from mathinterp.experiments.results import Results
from mathinterp.experiments.stability.tables import TABLES
from mathinterp.gates import MOST_DRAWS, MOST_SEED, whole

if TYPE_CHECKING:
    import pyarrow as pa

    from mathinterp.experiments.stability.result import Stability
    from mathinterp.store import Store

NAME = "stability"  # in the column ``scan`` of the view runs
DRAWS, LEAST_DRAWS = 200, 20
AT_ONCE = 500_000  # rows of a run of which its summary works out the draws at once: some tenths of a second
PROMPTS = """SELECT prompt_id, coalesce(operation, 'none') AS operation, template
             FROM prompts JOIN run_records USING (prompts_fingerprint) WHERE run_id = $run"""


def stability_of(store: Store, run: str = "latest", *, draws: int = DRAWS, seed: int = 0) -> Stability:
    """How stable the ranking of a finished run is, computed and stored, or read where it is stored.

    Args:
        run: its id; "latest": the run finished last that ranks something; none under `decide`.
        draws: of prompts, and of templates.
        seed: of the draws; they depend on it and on the run alone.
    Raises:
        UserError: no such run, one that is not finished, ranks nothing or lacks prompts of some nodes; or a number of
            draws or a seed that cannot be.
    """
    draws, seed = _number("draws", draws, LEAST_DRAWS, MOST_DRAWS), _number("seed", seed, 0, MOST_SEED)
    ranked = _rankings()
    of = finished_run(store, _latest(store, ranked) if run == "latest" else run, "nodes", ranked)
    parameters = {"of": of["run_id"], "draws": draws, "seed": seed}
    identity = {name: of[name] for name in ("dtype", "model_fingerprint", "prompts_fingerprint")}
    own = store.run_id(NAME, parameters, **identity)
    if not Results(store, own).finished:
        store.check_writable()
        tables = _computed(Results(store, of["run_id"]), ranked[of["scan"]], draws, seed)
        _write(store, {**identity, "model": of["model"], "prompts": of["prompts"]}, parameters, tables)
    rows = "SELECT * EXCLUDE (run_id) FROM {} WHERE run_id = $run"
    nodes, overlap = (store.arrow(rows.format(table), {"run": own}) for table in TABLES)
    return _result(of["run_id"], of["scan"], draws, seed, nodes, overlap)


def stability_lines(results: Results) -> list[str]:
    """Sentences on the stability of a run's ranking, for its summary: of what is stored, else of draws made now.

    Of a large run, which would take longer, one that says how to find out.
    """
    from mathinterp.experiments.registry import experiments

    run = results.run
    if run is None:  # the store is gone: whoever asked says so
        return []
    experiment = experiments()[run["scan"]]
    assert experiment.node_ranking is not None, f"{experiment.name} does not say how it ranks"
    if run["status"] != "finished":
        return []
    asked = "SELECT draws, seed FROM stability_runs WHERE run_id = $run AND shown"  # looks at all runs of the store
    if stored := results.rows(asked) if _was_computed(results) else []:
        return stability_of(results.store, results.run_id, **stored[0]).lines()
    counts = " + ".join(f"(SELECT count(*) FROM {table} WHERE run_id = $run)" for table in experiment.tables)
    if results.rows(f"SELECT {counts} AS n")[0]["n"] > AT_ONCE:
        return [f"How stable this ranking is: mathinterp stability `run` {results.run_id}"]
    try:
        found = _computed(results, experiment.node_ranking, DRAWS, 0)
    except UserError as error:
        return [f"How stable this ranking is cannot be told: {error}."]
    return _result(results.run_id, experiment.name, DRAWS, 0, *found).lines()


def _was_computed(results: Results) -> bool:
    """Whether the store has a computation of the run, finished or not; only records of computations are read."""
    files = results.store.files.find(next(iter(TABLES)), ".parquet")
    computations = {name.split("/")[1].removeprefix("run_id=") for name in files if name.count("/") == 2}
    records = filter(None, map(results.store.record, sorted(computations)))
    return any(record["parameters"].get("of") == results.run_id for record in records)


def _rankings() -> dict[str, Ranking]:
    from mathinterp.experiments.registry import experiments

    return {name: each.node_ranking for name, each in experiments().items() if each.node_ranking is not None}


def _number(field: str, given: object, least: int, most: int) -> int:
    try:
        return whole(given, least, most)
    except ValueError as error:
        raise UserError(f"`{field}` {error}") from error


def _latest(store: Store, ranked: dict[str, Ranking]) -> str:
    rows = store.rows("SELECT run_id, scan FROM latest_runs WHERE NOT adaptive ORDER BY finished_at DESC, run_id")
    found = [str(row["run_id"]) for row in rows if row["scan"] in ranked]
    if not found:
        raise UserError(f"no finished run in {store.url} ranks anything; run one of {', '.join(ranked)} first")
    return found[0]


def _computed(results: Results, ranking: Ranking, draws: int, seed: int) -> list[pa.Table]:
    """Rows of the two tables, from the run's rows."""
    from mathinterp.experiments.stability.resample import grid_of, resampled

    with_run = {"run": results.run_id}
    rows, prompts = (results.store.arrow(sql, with_run) for sql in (ranking.values, PROMPTS))
    run = results.run
    assert run is not None, "draws of no run"
    try:
        grid = grid_of(rows, prompts, ranking)
    except UserError as error:
        raise UserError(f"run {results.run_id}: {error}") from error
    return resampled(grid, ranking, run["parameters"], draws, seed)


def _write(store: Store, about: dict[str, Any], parameters: dict[str, Any], tables: list[pa.Table]) -> None:
    from mathinterp.versions import code_version, is_command, with_option

    shards = [f"{table}/00000" for table in TABLES]
    run = store.open_run(scan=NAME, parameters=parameters, code_version=code_version(), shards=shards, **about)
    told = run.record["command"]
    if told is not None and is_command(told, NAME):  # the latest run may be another one then
        run.record["command"] = with_option(told, "run", parameters["of"])
    for table, rows in zip(TABLES, tables, strict=True):
        store.write_shard(run.run_id, table, 0, rows, {"scan": NAME, **run.record["parameters"]})
    run.finish()


def _result(run_id: str, scan: str, draws: int, seed: int, nodes: pa.Table, overlap: pa.Table) -> Stability:
    from mathinterp.experiments.stability.result import Stability
    from mathinterp.frame import Frame

    return Stability(run_id, scan, draws, seed, Frame.of(nodes), Frame.of(overlap))
