"""Text: rendering with boundaries in tokens, token streams, stop strings. No MLX."""
