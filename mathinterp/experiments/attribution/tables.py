"""The table that attribution fills; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import HEAD, LAYER
from mathinterp.experiments.table import Table

METHODS = ("atp", "eap-ig-inputs", "eap-ig-activations", "relp", "atp-star")

NODE_ATTRIBUTIONS = pa.schema(
    [
        pa.field("method", pa.string()),
        pa.field("node", pa.string()),  # head, mlp or neuron
        LAYER,
        HEAD,  # null for what is no head
        pa.field("neuron", pa.int32()),  # null for what is none
        pa.field("prompt_id", pa.string()),
        pa.field("effect", pa.float32()),
    ]
)

TABLES = {
    "node_attributions": Table(
        NODE_ATTRIBUTIONS,
        ("method", "node", "layer", "head", "prompt_id"),
        doc="estimated effect of one node on one prompt: the change of the logit difference, answer minus distractor"
        " at END, were the node's output as on the counterfactual at every token (parameters.positions end: at END)."
        " exact_node_effects has the exact one. node: 'head', 'mlp' or 'neuron'.",
    ),
}
