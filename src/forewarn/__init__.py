"""Forewarn: GPU health monitoring and failure prediction for training clusters.

The code lives in the top-level folders `collectors`, `models` and `daemon`; the links beside
this file give them their import names `forewarn.collectors`, `forewarn.models`, `forewarn.daemon`.
"""

__version__ = "0.1.0"
