"""The deadline policy. It decides which capacity type (spot or on-demand) a job with a deadline may use now."""
