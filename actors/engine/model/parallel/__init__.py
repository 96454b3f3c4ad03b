"""One model that several processes compute together. Each process has some of the layers, or a part of the heads and
columns of each layer.
"""
