"""How long a server takes: to the first token of a turn, and for many requests at once."""
