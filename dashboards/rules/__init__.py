"""Alert and recording rules as data: each rule is one tree, which is both written as PromQL and computed by raytide's
own evaluator.
"""
