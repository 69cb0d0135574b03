"""Tests of mtplx.models."""
