"""What is read on a node: one file per source, the protocol they share and the catalog of what they may say.

This package is the ground: it imports nothing of `forewarn.models` or `forewarn.daemon`, and stays slim
(no numpy, pandas or pydantic), because it runs beside the training job.
"""
