"""The configuration of data, models, training and scripts, as users write it."""
