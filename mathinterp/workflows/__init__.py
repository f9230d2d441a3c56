"""Workflows: several runs, one after another, as one function that returns what they found.

Knows experiments and how they are run; knows nothing about the command line.
"""
