"""Figures of everything that raytide measures, drawn with matplotlib. They need no scripts and no network."""
