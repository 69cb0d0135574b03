"""HTTP: routes, wire shapes, server-sent events. Knows no MLX."""
