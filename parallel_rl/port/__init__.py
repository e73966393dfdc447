"""Conversion of other frameworks' configs, with every default that differs named: `options.options_of`."""
