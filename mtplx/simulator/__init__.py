"""Runs the scheduler against a cost instead of a model: `mtplx simulate`."""
