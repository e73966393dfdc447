"""Configs of other frameworks, carried over into this one's, with every default that differs named: `options.options_of`."""
