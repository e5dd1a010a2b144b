"""One model on several machines: the ranks, what they say to one another, and how they share a model's work."""
