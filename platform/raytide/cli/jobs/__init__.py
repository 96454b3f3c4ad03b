"""The commands for jobs: submitting them, watching them, and reading the records of training runs."""
