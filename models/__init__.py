"""From readings to risk: features, labels, training, evaluation, calibration, explanation, rules, registry.

Imports `forewarn.collectors` (the catalog, events, facts of XIDs) and never `forewarn.daemon`.
"""
