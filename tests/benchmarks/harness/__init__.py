"""What step_time.py is made of: the workload, the process that trains it, and the report."""
