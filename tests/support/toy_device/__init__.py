"""A package that brings a device of its own: tensors of the CPU under another name, "toy".

`description.py` is its entry point. Nothing of nanoinfer names it.
"""
