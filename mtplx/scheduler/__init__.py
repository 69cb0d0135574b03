"""Decides what each iteration computes: pure Python, no MLX, no threads, no clock."""
