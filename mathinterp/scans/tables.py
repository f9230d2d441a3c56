"""The columns of every table that scans fill; the store adds run_id.

Knows names and types only, so that reading a store needs no torch.
"""

import pyarrow as pa

LAYER, HEAD = pa.field("layer", pa.int16()), pa.field("head", pa.int16())

TOKEN_SCORE = (
    pa.field("prompt_id", pa.string()),
    pa.field("position", pa.int16()),  # index among the prompt's scored answer tokens, 0 = first
    pa.field("correct", pa.bool_()),  # argmax equals gold
    pa.field("logprob", pa.float32()),  # of the gold token, nats
    pa.field("logit", pa.float32()),  # of the gold token, after a final soft-cap
    pa.field("predicted_id", pa.int32()),
)

BASELINE = pa.schema(TOKEN_SCORE)
HEAD_SCAN = pa.schema([LAYER, HEAD, *TOKEN_SCORE])
MLP_SCAN = pa.schema([LAYER, *TOKEN_SCORE])

CURVE = (
    pa.field("ranking", pa.string()),  # effect, random or random_layer
    pa.field("seed", pa.int16()),  # of the random draw; 0 for effect
    pa.field("k", pa.int16()),  # heads knocked out together
)
KNOCKOUT_SCAN = pa.schema([*CURVE, *TOKEN_SCORE])
KNOCKOUT_HEADS = pa.schema([*CURVE, pa.field("place", pa.int16()), LAYER, HEAD])  # place: 1 = first of its ranking
KNOCKOUT_EXAMPLES = pa.schema(
    [
        pa.field("sentence", pa.string()),
        pa.field("k", pa.int16()),
        pa.field("rank", pa.int16()),  # 1 = likeliest next token
        pa.field("token_id", pa.int32()),
        pa.field("token", pa.string()),
        pa.field("probability", pa.float32()),
    ]
)
ITERATIVE_SCAN = pa.schema(
    [
        pa.field("step", pa.int16()),  # from 0; the heads masked in steps before it are masked too
        LAYER,
        HEAD,
        pa.field("masked", pa.bool_()),  # whether the step masks this head
        pa.field("accuracy_before", pa.float32()),  # fraction, mean over operations: only the earlier heads masked
        pa.field("accuracy", pa.float32()),  # this head masked too
        pa.field("logprob_change", pa.float32()),  # nats a unit, mean over operations: what this head adds
    ]
)

PATH_NODE = (
    pa.field("node", pa.string()),  # head or mlp
    LAYER,
    HEAD,  # null for an MLP
    pa.field("prompt_id", pa.string()),
)
PATH_SCAN = pa.schema(
    [
        *PATH_NODE,
        pa.field("logit_original", pa.float32()),  # of the scored token, after a final soft-cap
        pa.field("logit_patched", pa.float32()),
        pa.field("effect", pa.float32()),  # under the measure that the run ranks by
        pa.field("logprob_change", pa.float32()),  # nats
        pa.field("probability_change", pa.float32()),
        pa.field("centred_change", pa.float32()),  # of the logit minus the vocabulary's mean logit
    ]
)
PATH_PAIRS = pa.schema(
    [
        pa.field("prompt_id", pa.string()),
        pa.field("correct", pa.bool_()),  # on X_r
        pa.field("kept", pa.bool_()),  # whether path_scan has the pair
        pa.field("logit_original", pa.float32()),  # of the scored token
        pa.field("logit_counterfactual", pa.float32()),
        pa.field("logprob_original", pa.float32()),  # nats
        pa.field("logprob_counterfactual", pa.float32()),
        pa.field("predicted_id", pa.int32()),  # on X_r
    ]
)
ATTRIBUTION_SCAN = pa.schema(
    [
        *PATH_NODE,
        pa.field("first_order", pa.float32()),  # estimated change of the logit: gradient x (X_c - X_r)
        pa.field("direct", pa.float32()),  # the node's direct share of the logit on X_r, before a final soft-cap
    ]
)

TUNING_RUNS = pa.schema(
    [
        pa.field("step", pa.int32()),  # optimizer steps done, from 1
        pa.field("loss", pa.float32()),  # nats an answer token, mean since the row before
        pa.field("lr", pa.float32()),  # of this step
        pa.field("samples_per_second", pa.float32()),  # all workers together, since the row before
        pa.field("tokens_per_second", pa.float32()),  # of the samples, padding not counted
        pa.field("memory", pa.int64()),  # bytes, most so far: on the GPU of worker 0, else of its process
        pa.field("trained_parameters", pa.int64()),
    ]
)

_PAIR = ("importance", "coefficient", "intervened_importance", "intervened_coefficient")
NEURON_SCAN = pa.schema(
    [
        pa.field("node", pa.string()),  # neuron; head; ffn (the whole MLP's output); neurons (sum); attention (whole)
        LAYER,
        pa.field("unit", pa.int32()),  # number of the neuron or head; 0 for the others
        pa.field("prompt_id", pa.string()),  # null: a summary over the operation's prompts
        pa.field("operation", pa.string()),
        pa.field("n", pa.int32()),  # prompts behind the row
        *(pa.field(name, pa.float32()) for name in _PAIR),  # of the prompt, or means; intervened: null if there is none
        *(pa.field(f"{name}_std", pa.float32()) for name in _PAIR),  # over prompts (divided by n); summaries only
        pa.field("change", pa.float32()),  # of importance; summaries only: else a view works it out
        pa.field("change_std", pa.float32()),
        pa.field("coefficient_change", pa.float32()),
        pa.field("coefficient_change_std", pa.float32()),
    ]
)
NEURON_TARGETS = pa.schema(
    [
        pa.field("prompt_id", pa.string()),
        pa.field("condition", pa.string()),  # original or intervened
        pa.field("target_id", pa.int32()),  # the token w that importances are about
        pa.field("logprob", pa.float32()),  # of w at END, nats
        pa.field("predicted_id", pa.int32()),
        pa.field("correct", pa.bool_()),  # predicted_id is the first scored answer token
    ]
)

ATTENTION_SCAN = pa.schema(
    [
        LAYER,
        HEAD,  # query head
        pa.field("prompt_id", pa.string()),
        pa.field("token_type", pa.string()),  # bos, operand_a, operand_b, operator, equals or other
        pa.field("mean", pa.float32()),  # attention weight at END per token of the type; null if there is none
        pa.field("mass", pa.float32()),  # total weight on the type
        pa.field("tokens", pa.int16()),  # tokens of the type, up to END
        pa.field("argmax", pa.bool_()),  # whether a token of the type has the largest weight outside BOS
    ]
)
MLP_PROBE = pa.schema(
    [
        LAYER,
        pa.field("prompt_id", pa.string()),
        pa.field("target", pa.string()),  # first digit token of: a, b (operands) or c (answer)
        pa.field("mlp_in", pa.float32()),  # cosine with the target's row of W_U
        pa.field("mlp_out", pa.float32()),
        pa.field("difference", pa.float32()),  # of mlp_out - mlp_in
    ]
)
