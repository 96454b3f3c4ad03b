"""Figures of everything raytide measures, drawn with matplotlib: static, so that they need no script and no network."""
