"""Other people's fine-tuning programs, run as their users run them, beside plain torch.

`make test-stack-NAME` makes an environment with what NAME.txt says and runs test_NAME.py in it.
"""
