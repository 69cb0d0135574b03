"""Models: loading, what their caches can do, and running them."""
