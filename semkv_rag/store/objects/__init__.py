"""Files in an object store, with a folder of this machine in front of it."""
