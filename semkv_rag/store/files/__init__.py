"""The store's files: their formats, their places, and how they are written and read."""
