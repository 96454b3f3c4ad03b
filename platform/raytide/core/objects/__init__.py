"""The nouns of raytide: nodes, gangs, jobs, endpoints, teams, snapshots, plans."""
