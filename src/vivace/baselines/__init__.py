"""Other people's methods on the same seams, so that a comparison compares ideas and not code.

Each is a small file with its configuration, its weights and what fills a seam; those that train have an objective
beside them. ``specs.py`` describes them to the table of methods.
"""
