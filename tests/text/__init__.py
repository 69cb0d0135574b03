"""Tests of mtplx.text."""
