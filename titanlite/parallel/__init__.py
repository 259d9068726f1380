"""The parallelism layer: mesh, every technique in one fixed order, initial values, replica check.

May import runtime, config, models.common, registry and errors. Never imports the data, the
optimizer, the loop or a registered model.
"""
