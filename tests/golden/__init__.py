"""A small stored run of every experiment, whose rows may change only together with the result-format number."""
