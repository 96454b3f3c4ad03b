"""Endpoints on Ray Serve: the deployment of replicas, its control by raytide's controller, and the scaling policy."""
