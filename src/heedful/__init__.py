"""heedful: see, speed up and resize the attention of any transformer."""
