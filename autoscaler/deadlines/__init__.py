"""The deadline policy: which capacity type a job with a deadline may use now."""
