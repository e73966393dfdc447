"""Losses inside frameworks that run the loop themselves; each module states and undoes its host's hidden factor.

No module here imports its host: what it needs of it, it takes from the objects that the host hands over.
"""
