"""Alert and recording rules as data. Each rule is an expression tree: it is written as PromQL, and raytide's own
evaluator computes it.
"""
