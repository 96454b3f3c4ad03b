"""The objects that raytide manages: nodes, gangs, jobs, endpoints, teams, snapshots, plans."""
