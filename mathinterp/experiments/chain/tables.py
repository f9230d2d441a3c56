"""The tables that chains fill; columns and types only."""

import pyarrow as pa

from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.table import Table

CHAIN_SCAN = pa.schema(
    [
        pa.field("prompt_id", pa.string()),
        pa.field("operation", pa.string()),
        pa.field("stage", pa.string()),  # shallow_neuron, attention, head, deep_neuron or prediction
        pa.field("place", pa.int32()),  # 1 = first of the prompt's stage (shallow_neuron: of its head)
        LAYER,
        pa.field("unit", pa.int32()),  # number of the neuron or head
        pa.field("via_layer", pa.int16()),  # the head that moves a shallow neuron's writing, or that is zeroed
        pa.field("via_head", pa.int16()),
        pa.field("arithmetic", pa.bool_()),  # whether a head is one of the prompt's arithmetic heads
        pa.field("position", pa.int16()),  # index of the token that is read, or where a neuron writes
        pa.field("token_id", pa.int32()),  # of it; prediction: the predicted one
        pa.field("token", pa.string()),
        pa.field("token_type", pa.string()),  # bos, operand_a, operand_b, operator, equals or other
        pa.field("target", pa.bool_()),  # prediction: whether the token is w
        pa.field("weight", pa.float32()),  # attention from END
        pa.field("effect", pa.float32()),  # on the log-odds of w, first order, nats
        pa.field("exact_effect", pa.float32()),  # on the log-odds of w, nats
        pa.field("deep_effect", pa.float32()),  # part of the deep neurons' coefficients, first order
        pa.field("from_neurons", pa.float32()),  # of effect: what FFN neurons of earlier layers put there
        pa.field("importance", pa.float32()),  # nats
        pa.field("importance_zeroed", pa.float32()),
        pa.field("change", pa.float32()),  # importance - importance_zeroed
        pa.field("coefficient", pa.float32()),  # shallow_neuron: at the token; deep_neuron: at END
        pa.field("coefficient_zeroed", pa.float32()),
        pa.field("logprob", pa.float32()),  # of w, nats
        pa.field("logprob_zeroed", pa.float32()),
        pa.field("probability", pa.float32()),  # of w; prediction: of the token
        pa.field("probability_zeroed", pa.float32()),
        pa.field("tokens", pa.string()),  # JSON list: first tokens of the neuron's writing (shallow: through the head)
    ]
)

TABLES = {
    "chain_scan": Table(
        CHAIN_SCAN,
        ("prompt_id", "stage", "layer", "via_layer", "via_head", "token_type"),
        doc="the links of each prompt's chain as they are stored; read the view chain instead.",
    ),
}
