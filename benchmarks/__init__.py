"""Benchmarks of keras_fastdata against what a user could pick instead."""
