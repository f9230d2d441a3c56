"""How long does the stability of a ranking take? 200 draws over a full head grid, 1,024 heads x 1,600 prompts.

    python benchmarks/stability.py                # 1.64 M rows, 2 cores, some seconds
    python benchmarks/stability.py --draws 1000

Prints the wall time of ``stability_of``, rows read and result written (target under 5 s with 200 draws), and of reading
what is stored. The grid is that of benchmarks/sql.py, its prompts in eight templates. Needs no model.
"""

import argparse
import json
import tempfile
import time

from sql import build  # beside this file

from mathinterp.experiments.stability import DRAWS, stability_of
from mathinterp.store import Store


def main() -> None:
    """Build, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--repeats", type=int, default=3, help="with other seeds; the fastest counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, rows = build(Store(folder), 1, seed=0, templates=8)
        seconds, cpu = [], []
        for seed in [*range(options.repeats), 0]:
            start, busy = time.perf_counter(), time.process_time()
            found = stability_of(Store(folder), run, draws=options.draws, seed=seed)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
    *computed, again = seconds
    figures = {"seconds": min(computed), "cpu seconds": min(cpu[:-1]), "read again": again}
    if options.json:
        print(json.dumps({"rows": rows, "draws": options.draws, **figures}))
        return
    print(
        f"{rows:,} rows, {options.draws} draws of prompts and of templates: {min(computed):.2f} s (target under 5 s),"
        f" of which {min(cpu[:-1]):.2f} s of CPU time"
    )
    print(f"read where it is stored: {again:.2f} s; {len(found.nodes):,} rows of nodes")


if __name__ == "__main__":
    main()
