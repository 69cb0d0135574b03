"""MTPLX: an inference server for language models on your own machine."""

# First of all, since MLX binds its matrix products when it is imported.
from mtplx import backend as backend

__version__ = "0.1.0"
