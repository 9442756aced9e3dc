"""The only package that imports transformers and accelerate."""
