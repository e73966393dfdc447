"""Records of a run, parsed and checked; records/ reads files of any size and knows no kind of record."""
