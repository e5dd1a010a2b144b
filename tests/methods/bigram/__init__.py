"""A toy method with weights: the likeliest follower of each token drafts. All of it is in this folder."""
