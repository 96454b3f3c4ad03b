"""Serving: the OpenAI-compatible HTTP front of an engine, and its Ray Serve deployment. `docs/serving.md` is the map.

`openai_api/wire`, `http/app` and the modules that they use need neither Ray nor torch; `ray_serve/deployment` and
`ray_serve/control` need Ray, and `ray_serve/policy` needs nothing.
"""
