"""Serving: the OpenAI-compatible HTTP server of an engine, and its Ray Serve deployment. `docs/serving.md` gives an
overview.

`openai_api/wire`, `http/app`, the modules that they use, and `ray_serve/policy` can be imported without Ray and
torch. `ray_serve/deployment` and `ray_serve/control` need Ray.
"""
