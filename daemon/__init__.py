"""The running programs: the agent on a node, the service at the centre, the controller beside the job.

`agent`, `service` and `controller` never import each other; they share `wire` and `config` alone.
"""
