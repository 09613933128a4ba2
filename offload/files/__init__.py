"""Vectors in files: an asynchronous engine, and files that know what they hold."""
