"""The process that watches: it scrapes all metrics pages, keeps the history, evaluates alert rules and sends probes."""
