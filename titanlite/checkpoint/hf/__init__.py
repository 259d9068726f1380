"""Exchange with Hugging Face folders: names and transforms, files, export and loading. May import
the rest of checkpoint and the rooms below it. Never downloads, never runs code from a folder, and
never holds a whole model in memory.
"""
