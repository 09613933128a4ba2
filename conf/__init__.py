"""Hydra configuration groups: YAML only, no logic."""
