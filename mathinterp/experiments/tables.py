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

MASKKEEP_SCAN = pa.schema(
    [
        pa.field("mode", pa.string()),  # mask or keep
        pa.field("ranking", pa.string()),  # top (the prompt's first neurons) or random
        pa.field("seed", pa.int16()),  # of the random draw; 0 for top
        pa.field("k", pa.int32()),  # neurons of the prompt that are masked, or kept
        *TOKEN_SCORE,
    ]
)
MASKKEEP_NEURONS = pa.schema(
    [
        pa.field("ranking", pa.string()),
        pa.field("seed", pa.int16()),
        pa.field("prompt_id", pa.string()),
        pa.field("place", pa.int32()),  # 1 = first; places up to k are masked, or kept
        LAYER,
        pa.field("neuron", pa.int32()),
    ]
)

EDIT = (
    pa.field("edit", pa.string()),  # original, edited or random
    pa.field("seed", pa.int16()),  # of the random draw; 0 for the others
)
EDIT_SCAN = pa.schema([*EDIT, *TOKEN_SCORE])
EDIT_TEXT = pa.schema(
    [
        *EDIT,
        pa.field("passage", pa.int32()),  # number of the piece of text
        pa.field("tokens", pa.int32()),  # scored: all but the first
        pa.field("logprob", pa.float64()),  # nats, summed over them
    ]
)
EDIT_NEURONS = pa.schema([*EDIT, pa.field("rank", pa.int32()), LAYER, pa.field("neuron", pa.int32())])  # zeroed
GENDER_NEURONS = pa.schema(
    [
        LAYER,
        pa.field("neuron", pa.int32()),
        pa.field("stereotype", pa.string()),  # woman or man
        pa.field("professions", pa.int16()),  # of this stereotype
        pa.field("change", pa.float32()),  # stereotyped - other
        pa.field("stereotyped", pa.float32()),  # importance, nats, summed over the professions, after their own gender
        pa.field("other", pa.float32()),  # the same after the other gender
    ]
)

SWEEP_SCAN = pa.schema(
    [
        LAYER,  # that has the LoRA
        pa.field("learning_rate", pa.float64()),
        pa.field("training_loss", pa.float32()),  # nats an answer token, at the end
        pa.field("validation_loss", pa.float32()),
        pa.field("validation_accuracy", pa.float32()),  # of answer tokens; what the learning rate is chosen by
        pa.field("trained_parameters", pa.int64()),
        pa.field("seconds", pa.float32()),  # of training
        *TOKEN_SCORE,
    ]
)
SWEEP_NEURONS = pa.schema(
    [
        pa.field("tuned_layer", pa.int16()),  # that has the LoRA
        pa.field("learning_rate", pa.float64()),
        pa.field("prompt_id", pa.string()),
        pa.field("rank", pa.int16()),  # by change of importance, tuned - original, over all layers; 1 = first
        LAYER,
        pa.field("neuron", pa.int32()),
        pa.field("importance", pa.float32()),  # original, nats
        pa.field("tuned_importance", pa.float32()),
        pa.field("coefficient", pa.float32()),  # original
        pa.field("tuned_coefficient", pa.float32()),
    ]
)

CONDITION = (
    pa.field("condition", pa.string()),  # origin, lora, pruned, random, pruned_lora or random_lora
    pa.field("seed", pa.int16()),  # of the random draw; 0 for the others
)
PRUNE_SCAN = pa.schema([*CONDITION, *TOKEN_SCORE])
PRUNE_NEURONS = pa.schema([*CONDITION, LAYER, pa.field("neuron", pa.int32())])  # kept in the pruned layers

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

CONCEPT_SCAN = pa.schema(
    [
        LAYER,  # of the neuron; null: a random direction
        pa.field("neuron", pa.int32()),  # or the direction's number
        pa.field("attention_layer", pa.int16()),  # through whose value-output matrix; null: the value itself
        pa.field("sign", pa.int8()),  # 1: the value, -1: its negative
        pa.field("hits", pa.int16()),  # concepts among the first tokens
        pa.field("concepts", pa.string()),  # JSON list of them, likeliest first; null: none
        pa.field("tokens", pa.string()),  # JSON list of the very first tokens; null where there are no hits
    ]
)
CONCEPT_ZEROING = pa.schema(
    [
        pa.field("neurons", pa.string()),  # concepts (those kept at the level) or random (as many a layer)
        pa.field("level", pa.int16()),  # kept: hits > level
        pa.field("seed", pa.int16()),  # of the random draw; 0 for concepts
        pa.field("zeroed", pa.int32()),  # neurons at zero
        *TOKEN_SCORE,
    ]
)

_GRAPH = (
    pa.field("graph", pa.string()),  # its prompt_id, or its operation ("all": all of them)
    pa.field("operation", pa.string()),
)
_EDGE = (
    pa.field("inner_product", pa.float32()),  # of value and keys
    pa.field("signed_product", pa.float32()),  # positive: pushes the factors of the upper coefficient away from 0
    pa.field("first_order", pa.float32()),  # what the lower neuron adds to the upper one's |coefficient|
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
EVALUATIONS = pa.schema(
    [
        pa.field("task", pa.string()),  # a benchmark, or the name of a prompt set
        pa.field("subset", pa.string()),  # operation, MMLU's subject, else the task
        pa.field("item_id", pa.string()),
        pa.field("correct", pa.bool_()),
        pa.field("response", pa.string()),  # what the model wrote; under multiple choice the likeliest letter
        pa.field("predicted", pa.string()),  # the number or letter read from it; null if there is none
        pa.field("target", pa.string()),
        pa.field("logprob", pa.float32()),  # of the right choice, nats; null where text is generated
        pa.field("truncated", pa.bool_()),  # the context was cut on the left to fit the model
    ]
)

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
