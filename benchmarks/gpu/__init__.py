"""What only a GPU can tell, in parts: kernels against torch, times of attention and of decoding, conversion and training."""
