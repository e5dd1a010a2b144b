"""Training put together: a recipe, a base and prompt files in, an adapter that is ready to decode out.

The loop (``train/``) knows no technique and a technique (``multirate/``) knows no loop; they meet here, in a module
for each kind of adapter that has its technique's name.
"""
