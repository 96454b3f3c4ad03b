"""Writers of a dataset's files: token shards with their indices, and the kept text."""
