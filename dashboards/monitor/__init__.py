"""The monitoring process: it scrapes all metrics pages, writes the history, evaluates alert rules and sends probes."""
