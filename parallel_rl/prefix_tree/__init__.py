"""Prefix trees: which tokens of several sequences are stored once, where in the row, and how a context rank reads them.

Legend: B sequences, S columns of the data, T positions of the tree's row. A *flat token* is a token of one sequence;
sequences that share a prefix have several flat tokens at one row position.
"""

from parallel_rl.prefix_tree.build import build_tree, from_nodes
from parallel_rl.prefix_tree.tree import PrefixTree

__all__ = ["PrefixTree", "build_tree", "from_nodes"]
