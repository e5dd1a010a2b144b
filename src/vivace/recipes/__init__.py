"""Training recipes: YAML files, their dataclasses, and the trainers that follow them.

The package lies above the engine, because a trainer generates answers with the decoder as it decodes, and times the
result of the training.
"""
