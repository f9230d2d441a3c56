"""How fast is SQL over a full head grid? 32 layers x 32 heads x 1,600 prompts in 64 files, random results.

    python benchmarks/sql.py                 # 1.64 M rows, 2 threads, about half a minute
    python benchmarks/sql.py --positions 2   # half of the prompts have a second scored token: 2.46 M rows

Prints the median time of ``head_effects`` over the whole run (target under 2 s), of a plain GROUP BY (under 0.2 s),
of the paper's tables, and of opening the store. Knows the store; needs no model.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import duckdb
import numpy as np
import pyarrow as pa

from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.store import Store, prompts_fingerprint

LAYERS, HEADS, PROMPTS, FILES = 32, 32, 1600, 64
QUERIES = {
    "head_effects": ("SELECT * FROM head_effects", 2.0),
    "head_effects of one run": ("SELECT * FROM head_effects WHERE run_id = '{run}'", None),
    "GROUP BY": ("SELECT layer, head, avg(correct::INT) FROM head_scan GROUP BY layer, head", 0.2),
    "paper_a_table1": ("SELECT * FROM paper_a_table1 WHERE rank <= 5 ORDER BY rank", None),
    "paper_a_table2": ("SELECT * FROM paper_a_table2 WHERE rank <= 5 ORDER BY rank", None),
    "paper_a_table3": ("SELECT * FROM paper_a_table3 WHERE rank <= 5 ORDER BY rank", None),
    "runs": ("SELECT * FROM runs", None),
}


def synthetic_prompts(positions: int, templates: int = 1) -> list[TokenizedPrompt]:
    """1,600 prompts of four operations; every other one has ``positions`` scored tokens, the rest one."""
    prompts = []
    for number in range(PROMPTS):
        operation = ("add", "sub", "mul", "div")[number * 4 // PROMPTS]
        prompt = Prompt(f"{number}", f"prompt {number} is", "12", operation, "25", str(10 + number % 90),
                        f"template {number % templates}")  # fmt: skip
        scored = tuple(
            ScoredToken(position, 5 + position, 7, "7", "digit", ("change-one", "memorize")[number // 2 % 2])
            for position in range(positions if number % 2 else 1)
        )
        prompts.append(TokenizedPrompt(prompt, tuple(range(5 + positions)), scored))
    return prompts


def random_scores(units: list[tuple[str, int]], right: np.ndarray, random: np.random.Generator) -> dict[str, pa.Array]:
    """Columns of a token score for each (prompt_id, position), correct where ``right``."""
    count = len(units)
    return {
        "prompt_id": pa.array([prompt for prompt, _ in units]),
        "position": pa.array([position for _, position in units], pa.int16()),
        "correct": pa.array(right),
        "logprob": pa.array(-random.exponential(size=count).astype(np.float32)),
        "logit": pa.array(random.normal(size=count).astype(np.float32)),
        "predicted_id": pa.array(random.integers(0, 32_000, count).astype(np.int32)),
    }


def build(store: Store, positions: int, seed: int, templates: int = 1) -> tuple[str, int]:
    """Write the synthetic run; returns its run id and the number of head_scan rows."""
    random = np.random.default_rng(seed)
    prompts = synthetic_prompts(positions, templates)
    fingerprint = prompts_fingerprint(prompts)
    units = [(prompt.prompt.prompt_id, token.position) for prompt in prompts for token in prompt.scored]
    baseline = random.random(len(units)) < 0.75
    run = store.open_run(
        scan="heads", model="synthetic", model_fingerprint="0", prompts="synthetic", prompts_fingerprint=fingerprint,
        dtype="bfloat16", parameters={"scoring": "token", "seed": seed}, code_version="benchmark",
        shards=["baseline/00000", *(f"head_scan/{index:05d}" for index in range(FILES))],
    )  # fmt: skip
    store.write_prompts(fingerprint, prompts)
    store.write_shard(run.run_id, "baseline", 0, pa.table(random_scores(units, baseline, random)), {})
    per_file = LAYERS * HEADS // FILES
    for index in range(FILES):
        parts = []
        for layer, head in (divmod(number, HEADS) for number in range(index * per_file, (index + 1) * per_file)):
            flipped = random.random(len(units)) < 0.03
            ids = {
                name: pa.array(np.full(len(units), value, np.int16))
                for name, value in (("layer", layer), ("head", head))
            }
            parts.append(pa.table({**ids, **random_scores(units, baseline ^ flipped, random)}))
        store.write_shard(run.run_id, "head_scan", index, pa.concat_tables(parts), {})
    run.finish()
    return run.run_id, len(units) * LAYERS * HEADS


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall time of ``repeats`` calls, after one that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fetch(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """Run a query to its last row."""
    return connection.sql(query).to_arrow_table()


def main() -> None:
    """Build, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=1, help="most scored tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run, rows = build(Store(folder), options.positions, seed=0)
        seconds = {"build": time.perf_counter() - start}
        seconds["open a store"] = median_seconds(lambda: Store(folder).connect(), options.repeats)
        connection = Store(folder).connect()
        connection.execute(f"SET threads = {options.threads}")
        for name, (query, _) in QUERIES.items():
            text = query.format(run=run)
            seconds[name] = median_seconds(partial(fetch, connection, text), options.repeats)
    if options.json:
        print(json.dumps({"rows": rows, "seconds": seconds}))
        return
    print(f"{rows:,} rows of head_scan in {FILES} files, {options.threads} threads, median of {options.repeats}")
    for name, value in seconds.items():
        target = QUERIES.get(name, ("", None))[1]
        print(f"{name:28s} {value:8.3f} s" + (f"   target under {target} s" if target else ""))


if __name__ == "__main__":
    main()
