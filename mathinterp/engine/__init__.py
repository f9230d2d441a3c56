"""How a model computes under interventions: engines, prefix trees, lenses, path patching; the self-test.

Knows models and tokens; knows nothing about experiments, stores or clusters.
"""

ENGINES = ("auto", "packed", "plain")
