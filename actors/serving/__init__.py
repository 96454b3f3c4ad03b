"""Serving: the OpenAI-compatible HTTP server of an engine, and its Ray Serve deployment. `docs/serving.md` gives an
overview.

`openai_api/wire`, `http/app` and the modules that they use need neither Ray nor torch. `ray_serve/deployment` and
`ray_serve/control` need Ray. `ray_serve/policy` needs neither.
"""
