"""One model computed by several processes, each with a part of the heads, feed-forward columns and vocabulary."""
