"""Chooses a replica for each request, by the prefixes in the replicas' caches and by the work that is queued there."""
