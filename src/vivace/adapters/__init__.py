"""Adapters by request: fine-tunes of one base, kept beside it in memory and chosen by each request.

``lora.py`` brings one LoRA of PEFT into the form in which a model adds it to the rows of a request; ``registry.py``
keeps those that requests may name, within a limit of memory.
"""
