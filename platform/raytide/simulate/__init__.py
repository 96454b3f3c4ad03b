"""Production decisions on recorded traces and a virtual clock, beside faithful baselines and lower bounds."""
