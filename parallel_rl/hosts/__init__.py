"""Losses inside frameworks that run the loop; each module states and undoes its host's hidden factor.

No module imports its host: it reads the objects that the host hands over.
"""
