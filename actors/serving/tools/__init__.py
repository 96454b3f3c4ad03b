"""Tool calls: the syntax of each kind of model, a parser of calls in outputs, and the constraint that makes calls
parse.
"""
