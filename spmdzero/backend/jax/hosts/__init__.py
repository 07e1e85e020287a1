"""Several hosts: how their processes meet, and what each has for itself."""
