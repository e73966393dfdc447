"""Records of any number in bounded memory: file patterns, a block index, reads on demand, a fixed order."""
