"""How stored chunks are found in a prompt, and what is taken from them."""
