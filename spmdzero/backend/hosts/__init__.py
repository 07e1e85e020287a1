"""Processes of one job, one per host: how they meet, join, watch each other and agree."""
