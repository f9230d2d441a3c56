"""How the models that come with the package were trained; run from a checkout, see train_*.py."""
