"""Records of any number in bounded memory: files by patterns, an index of blocks, reads on demand, the order a function."""
