"""The league: estimates of nodes' effects held against the exact effects, method by method (workflows/league.py)."""
