"""Processes of one job, one per host: how they find, join, watch and agree with each other."""
