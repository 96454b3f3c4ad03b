"""Alert and recording rules as data: one tree for Prometheus' language and for raytide's own evaluator."""
