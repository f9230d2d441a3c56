"""The tables that neuron graphs fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

AT_ONCE = 200  # prompts whose activations are held together, and single prompts' graphs in a file
_GRAPH = (
    pa.field("graph", pa.string()),  # its prompt_id, or its operation ("all": all of them)
    pa.field("operation", pa.string()),
)
NEURON_GRAPH_NODES = pa.schema(
    [
        *_GRAPH,
        LAYER,
        pa.field("neuron", pa.int32()),
        pa.field("rank", pa.int16()),  # 1 = first of the graph
        pa.field("root", pa.bool_()),  # the lowest of the graph
        pa.field("importance", pa.float32()),  # nats, in the neuron scan
        pa.field("change", pa.float32()),  # of importance, in the neuron scan; null if nothing was compared
        pa.field("coefficient", pa.float32()),  # mean over the graph's prompts
        pa.field("coefficient_size", pa.float32()),  # mean of its absolute value
        pa.field("n", pa.int32()),  # prompts of the graph
        pa.field("tokens", pa.string()),  # JSON list: first tokens of the value times the sign of the coefficient
    ]
)
_EDGE = (
    pa.field("inner_product", pa.float32()),  # of value and keys
    pa.field("signed_product", pa.float32()),  # positive: pushes the factors of the upper coefficient away from 0
    pa.field("first_order", pa.float32()),  # what the lower neuron adds to the upper one's |coefficient|
)
COLUMN_OF = {"sum": "inner_product", "signed": "signed_product", "first_order": "first_order"}  # measure -> column
NEURON_GRAPH_EDGES = pa.schema(
    [
        *_GRAPH,
        pa.field("place", pa.int32()),  # 1 = strongest of the graph
        LAYER,  # of the lower neuron
        pa.field("neuron", pa.int32()),
        pa.field("to_layer", pa.int16()),
        pa.field("to_neuron", pa.int32()),
        *_EDGE,  # means over the graph's prompts
        pa.field("signed_product_std", pa.float32()),  # over prompts (divided by n)
        pa.field("first_order_std", pa.float32()),
        pa.field("n", pa.int32()),
    ]
)
NEURON_GRAPH_CHECK = pa.schema(
    [
        *_GRAPH,
        pa.field("prompt_id", pa.string()),
        pa.field("k", pa.int16()),  # first neurons of the graph
        pa.field("zeroed", pa.string()),  # root (the lowest of them) or random (another neuron of its layer)
        pa.field("seed", pa.int16()),  # of the random draw; 0 for root
        pa.field("zeroed_layer", pa.int16()),
        pa.field("zeroed_neuron", pa.int32()),
        pa.field("zeroed_coefficient", pa.float32()),  # before it was zeroed
        LAYER,  # of another one of the first k
        pa.field("neuron", pa.int32()),
        pa.field("coefficient", pa.float32()),
        pa.field("coefficient_zeroed", pa.float32()),
        *_EDGE,  # from the zeroed neuron to this one; null where this one's layer is not later
    ]
)

TABLES = {
    "neuron_graph_nodes": Table(NEURON_GRAPH_NODES, ("graph", "operation", "layer")),
    "neuron_graph_edges": Table(NEURON_GRAPH_EDGES, ("graph", "layer", "to_layer")),
    "neuron_graph_check": Table(
        NEURON_GRAPH_CHECK,
        ("graph", "operation", "prompt_id", "k", "zeroed", "layer"),
        doc="coefficients at END of a graph's first k neurons before and after one neuron is zeroed at every "
        "position: 'root', the lowest of them, or 'random', another neuron of its layer. The three measures "
        "are those of the edge from the zeroed neuron to this one; null where this one's layer is not later, "
        "so that it cannot change.",
    ),
}
