"""The rules between keys, by subject: run (model, optimizer, saving), parallel, data, pipeline.

A rule is a generator function that yields refusals. Its parameters name the facts that it takes
(facts.py). May import config.schema, config.load, registry, layout and errors. Never looks at the
machine."""
