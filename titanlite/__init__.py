"""titanlite: pretraining with multi-dimensional parallelism. `titanlite --help` lists the commands."""

__version__ = "0.1.0"
