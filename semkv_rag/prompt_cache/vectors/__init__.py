"""Vectors of prompts and images, and the indexes that find the nearest of them."""
