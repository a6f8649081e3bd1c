"""The folder of a run: one owner of its format, writer and reader side by side."""
