"""The rules between keys, by subject: run (model, optimizer, saving), parallel, data.

May import config.schema, config.load, registry, layout and errors. Never looks at the machine.
"""
