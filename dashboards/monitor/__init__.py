"""The monitoring process: it scrapes metrics, writes their history, evaluates alert rules and sends probes."""
