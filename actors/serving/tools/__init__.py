"""Tool calls: models' syntaxes for them, a parser of calls in outputs, and the constraint that makes calls parse."""
