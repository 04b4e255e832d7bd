"""What only a GPU can tell, case by case: whether attention and generation are right there, and what they take."""
