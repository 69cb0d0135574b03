"""The one thread that owns MLX."""

from mtplx.engine.engine import Engine

__all__ = ["Engine"]
