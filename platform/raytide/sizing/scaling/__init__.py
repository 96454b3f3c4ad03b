"""Which model size and number of tokens give the lowest loss for a budget?"""
