"""The state store's records of models, datasets, endpoints, revisions, rollouts, feedback, orders and heads."""
