"""Converters in a user's own package: registered by `[model] package = "louder"`, no edit in
titanlite.
"""

from titanlite.registry import register_converter

register_converter("louder", "louder.converter:Louder")
register_converter("renaming", "louder.converter:Renaming")
