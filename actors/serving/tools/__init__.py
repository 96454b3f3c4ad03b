"""Tool calls: the call syntaxes of models, and a parser that finds the calls in a model's output."""
