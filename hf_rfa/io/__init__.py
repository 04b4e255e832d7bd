"""Files: texts and their tokens, and outputs that are written whole or not at all."""
