"""The law as a kit: any loss, on every layout, against one float64 process that holds everything.

cases          a loss under test, and what one process gets for it
batches        the data it meets, and its poisoned twin
layouts        layouts, their groups and their cuts
sharded        one step on one rank of a layout; `hidden_states` the same from hidden states and an LM head
compare        how far a layout is from one process
pool           real gloo ranks
"""
