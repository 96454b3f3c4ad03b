"""Tool calls: the syntaxes of models, a parser of calls in a model's output, and the constraint that makes every call
parse.
"""
