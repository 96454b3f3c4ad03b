"""Serving: the OpenAI-compatible HTTP front of an engine, and its Ray Serve deployment. `docs/serving.md` is the map.

`wire`, `app` and what they use need neither Ray nor torch; `deployment` and `control` need Ray, `policy` nothing.
"""
