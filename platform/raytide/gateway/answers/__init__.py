"""Answers that need no new computation: a request joins the running computation of an equal request, or gets a cached
answer."""
