"""The config: its schema, how files and the command line are read, and the rules between keys.

May import registry and errors. Never imports torch, and never imports a model by name.
"""
