"""Several experiments in a row as one function, each of which returns a result object.

Knows experiments, stores and clusters; knows nothing about the command line, and prints nothing.
"""
