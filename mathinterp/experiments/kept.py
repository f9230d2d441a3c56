"""How many prompts a scan read, from the run's notes: those answered rightly, unless all are asked for."""

from mathinterp.experiments.results import Results


def kept_line(results: Results) -> str:
    """One line for the reader of a finished attention scan or MLP probe; empty where the run has no notes yet."""
    names = ("prompts", "answered_rightly", "prompts_kept")
    columns = ", ".join(f"(notes ->> '{name}')::BIGINT AS {name}" for name in names)
    counts = results.rows(f"SELECT {columns} FROM runs WHERE run_id = $run")
    if not counts or counts[0]["prompts"] is None:
        return ""
    given, right, kept = (counts[0][name] for name in names)
    which = "the others are left out" if kept < given else "all are read"
    return f"The model answers {right} of {given} prompts rightly (first token); {which}."
