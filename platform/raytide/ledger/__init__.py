"""The ledger: the cost of every node, and the division of that cost among jobs, endpoints and waste. Amounts are exact
to the micro-dollar, and all functions are pure.
"""
