"""The kill tests many times over: resumed rows must equal undisturbed ones every time, not most of the time.

    python benchmarks/kill_tests_again.py                       # the concept scan's ten times, the others three times
    python benchmarks/kill_tests_again.py --other-processor     # as MKL computes on processors that are not Intel's

MKL takes other matrix products on AMD's processors, whose last bits depend on the number of threads and on where data
lie in memory; on an Intel machine a small preloaded library (needs cc) makes it believe that it runs on one.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

CONCEPTS = "tests/test_kills.py::test_concepts_killed_while_reading_and_again_while_zeroing"
OTHERS = ("tests/test_kills.py", "tests/test_faults.py", "tests/test_replica_counts.py")
NOT_INTEL = """
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
"""


@click.command()
@click.option("--times", default=10, show_default=True, help="Of the concept scan's test.")
@click.option("--others", default=3, show_default=True, help="Times of the other kill tests.")
@click.option("--other-processor", is_flag=True, help="As on a processor that is not Intel's.")
def main(times: int, others: int, other_processor: bool) -> None:
    """Run them; exits with 1 if any failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if other_processor:
            environment["LD_PRELOAD"] = str(not_intel(Path(folder)))
        asked = [[CONCEPTS]] * times + [list(OTHERS)] * others
        failed = [tests for tests in asked if not passes(tests, environment)]
    print(f"{len(asked) - len(failed)} of {len(asked)} passed")
    sys.exit(bool(failed))


def passes(tests: list[str], environment: dict[str, str]) -> bool:
    """Whether pytest is content with ``tests``; what it says is shown where it is not."""
    command = [sys.executable, "-m", "pytest", "--show-capture=no", *tests]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    print(done.stdout if done.returncode else f"passed: {' '.join(tests)}", flush=True)
    return done.returncode == 0


def not_intel(folder: Path) -> Path:
    """A library that, preloaded, hides from MKL that the processor is Intel's."""
    source, library = folder / "not_intel.c", folder / "not_intel.so"
    source.write_text(NOT_INTEL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


if __name__ == "__main__":
    main()
