"""The rules between keys, by subject: run (model, optimizer, saving), parallel, data, pipeline.

A rule is a generator function that yields refusals; each file lists its rules with their inputs
(check.py). May import the rest of config, registry and errors. Never looks at the machine."""
