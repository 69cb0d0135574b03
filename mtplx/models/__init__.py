"""Models: loading, what their caches can do, and running them."""

from mtplx.models.model import Model

__all__ = ["Model"]
