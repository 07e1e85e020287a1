"""Clients' and DeepSpeed's own tests, run with spmdzero in DeepSpeed's place: `make test-suites`.

What is run is fetched into `.suites/`, which git ignores. `NAME.toml` says from where and how it is
bent, `verdicts/NAME.toml` what each of its tests has to say.
"""
