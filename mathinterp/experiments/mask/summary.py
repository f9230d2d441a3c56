"""What a learned mask says: the nodes that stay open, how much m changes then, and the course of the training."""

from mathinterp.experiments.results import Results, Row, Shown, Summary

LAST = 20  # steps that the stated change is the mean of: one is a draw


def summarize(results: Results) -> Summary:
    """The most open nodes, and the loss at the beginning and end."""
    nodes = results.rows(
        """SELECT CASE node WHEN 'head' THEN layer || '.' || head ELSE 'mlp ' || layer END AS node, open, log_alpha
           FROM mask_scores WHERE run_id = $run ORDER BY log_alpha DESC, layer, head LIMIT 10"""
    )
    course = _course(results)
    verdict = (
        f"After {course['steps']} steps a node is open with probability {course['share']:.3f} in the mean (budget"
        f" {course['budget']:g}), and the squared change of the logit difference is {course['change']:.3g} of that"
        f" between the sentences (mean of the last {min(LAST, course['steps'])} steps)."
    )
    warnings = doubts(results)
    return Summary(
        parts=[Shown("Nodes that stay as they are (P: probability to be open)", nodes), verdict],
        data={"nodes": nodes, **course, "verdict": verdict, "warnings": warnings},
        queries=[results.query("SELECT * FROM mask_training WHERE run_id = $run ORDER BY step")],
        warnings=warnings,
    )


def _course(results: Results) -> Row:
    """The end of the training."""
    (course,) = results.rows(
        """SELECT avg(change) FILTER (step > last - $window) AS change, avg(open) FILTER (step = last) AS share,
                  any_value(last) AS steps, any_value(budget) AS budget
           FROM (SELECT *, max(step) OVER () AS last, (SELECT (parameters ->> 'budget')::DOUBLE FROM runs
                 WHERE run_id = $run) AS budget FROM mask_training WHERE run_id = $run)""",
        window=LAST,
    )
    return course


def doubts(results: Results) -> list[str]:
    """A line if the mask is more open than was asked for."""
    course = _course(results)
    if not course["steps"] or course["share"] <= 1.1 * course["budget"]:
        return []
    return [
        f"the mask is still more open than its budget: {course['share']:.3f}; give more `steps` or a larger `penalty`"
    ]
