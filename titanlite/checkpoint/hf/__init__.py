"""Holds the exchange with Hugging Face folders: names and transforms, files, export and loading.
May import the rest of checkpoint and the rooms below that.
Never downloads, never runs code of a folder, and never holds a whole model."""
