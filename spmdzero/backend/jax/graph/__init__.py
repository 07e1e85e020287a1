"""Recorded operations as a graph, and the programs that are compiled of it."""
