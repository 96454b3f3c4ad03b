"""Figures of everything that raytide measures, drawn with matplotlib. They need no JavaScript and no network."""
