"""One model computed by several processes, each with some of the layers or a part of their heads and columns."""
