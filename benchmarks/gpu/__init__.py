"""What only a GPU can tell, in parts: rounding and times of attention, times of decoding, conversion and training."""
