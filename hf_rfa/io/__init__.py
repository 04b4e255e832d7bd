"""Files: texts and their tokens, speech, and outputs that are written whole or not at all."""
