"""Sources become memory-mapped shards of tokens, once; a reader with an O(1) position."""
