"""Losses inside frameworks that run the loop; each framework's file or folder states and undoes its host's hidden factor."""
