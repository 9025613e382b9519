"""The models. To add one, add a file here.

When a model is first looked up, every module of this folder is imported and registers its classes.
"""
