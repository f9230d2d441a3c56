"""What a finished graph run says: one graph's strongest edges, the causal check, and whether edges foretell it.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from mathinterp.errors import UserError
from mathinterp.experiments.neuron_graph import GraphShown
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.text import quoted

MOST_ROWS = 12  # edges shown in a table
FALLS = {name + end: "" for name in ("root", "random") for end in ("", "_low", "_high")}


def summarize(results: Results, shown: GraphShown) -> Summary:
    """Strongest edges of ``shown.graph`` (None: "all", else the first prompt's); Table 6; and the agreement.

    Raises UserError for a graph that the run has not.
    """
    if not results.finished:
        return Summary()
    name = graph_name(results, shown.graph)
    where = "WHERE run_id = $run AND graph = $graph"
    root = results.rows(f"SELECT name FROM neuron_graph_nodes {where} AND root", graph=name)
    edges = results.rows(
        f"""SELECT lower_name AS "lower", upper_name AS "upper", inner_product, signed_product, first_order, share
            FROM neuron_graph_edges {where} ORDER BY place LIMIT {MOST_ROWS}""",
        graph=name,
    )
    check = results.rows(
        """SELECT cases, k, n, root, root_low, root_high, random, random_low, random_high FROM paper_a_table6
           WHERE run_id = $run AND operation = 'all' ORDER BY cases = 'all', k DESC"""
    )
    agreement = results.rows(
        """SELECT k, sum(n)::INTEGER AS n, avg(inner_product) AS inner_product, avg(signed_product) AS signed_product,
                  avg(first_order) AS first_order, avg(first_order_pearson) AS first_order_pearson
           FROM neuron_graph_agreement WHERE run_id = $run AND operation IS NOT DISTINCT FROM coalesce(
               (SELECT max(operation) FROM neuron_graph_agreement WHERE run_id = $run AND operation = 'all'), operation)
           GROUP BY k ORDER BY k DESC"""
    )
    named = f"WHERE run_id = $run AND graph = {quoted(name)}"
    queries = (
        f"SELECT * FROM neuron_graph_nodes {named} ORDER BY rank",
        f"SELECT * FROM neuron_graph_edges {named} ORDER BY place LIMIT 20",
        "SELECT * FROM paper_a_table6 WHERE run_id = $run ORDER BY operation, cases, k DESC",
        "SELECT * FROM neuron_graph_agreement WHERE run_id = $run ORDER BY operation, k DESC",
    )
    lowest = root[0]["name"] if root else "-"
    return Summary(
        parts=[
            Shown(f"Strongest edges of graph {name} (root {lowest})", edges),
            Shown(
                "Fall of the other first k neurons' coefficients (%), the lowest zeroed, or random ones of its layer",
                check,
                FALLS,
            ),
            Shown(
                "Rank correlation of edges from the root with the falls, prompt by prompt (pearson: by value)",
                agreement,
            ),
        ],
        data={"graph": name, "root": lowest, "edges": edges, "check": check, "agreement": agreement},
        queries=[results.query(query) for query in queries],
    )


def graph_name(results: Results, graph: str | None) -> str:
    """``graph``, or the one shown first; raises UserError for a graph that the run has not."""
    rows = results.rows("SELECT DISTINCT graph FROM neuron_graph_nodes WHERE run_id = $run ORDER BY graph")
    names = [row["graph"] for row in rows]
    if not names:
        raise UserError(f"run {results.run_id} has no graph; make one with 'mathinterp scan graph'")
    if graph is not None and graph not in names:
        raise UserError(
            f"run {results.run_id} has no graph '{graph}'; it has {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
        )
    return graph or ("all" if "all" in names else names[0])
