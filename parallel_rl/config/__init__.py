"""Configs of any part: strict frozen dataclasses from mappings, and YAML files that extend each other."""
