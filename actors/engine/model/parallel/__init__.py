"""One model that several processes compute together, each with some of the layers, or with a part of the heads and
columns of each layer.
"""
