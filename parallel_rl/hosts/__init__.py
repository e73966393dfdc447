"""Losses inside frameworks that run the loop; each module states and undoes its host's hidden factor."""
