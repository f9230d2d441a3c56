"""What a model's activations say about tokens: lenses, importances of neurons and heads, graphs of neurons.

The names of choices are here, where they can be read without torch.
"""

TARGETS = ("predicted", "gold")  # the token that importances are about
MEASURES = ("sum", "signed", "first_order")  # of an edge between two neurons
