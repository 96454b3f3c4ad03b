"""The kinds of stages: what each takes, how it is submitted, and what it made."""
