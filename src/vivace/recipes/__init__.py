"""Recipes: what to train and how, as YAML files their dataclasses, and the trainer that follows them.

Above the engine, because a training regenerates answers with the decoder as it decodes and times what came of it.
"""
