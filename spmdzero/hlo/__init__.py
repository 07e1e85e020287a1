"""Optimised HLO as text, read."""
