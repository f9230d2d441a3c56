"""Scans that stop when sure: which nodes lie above a threshold, decided prompt by prompt (docs/statistics.md)."""
